"""The daemon: an imperative shell around one pure step."""
