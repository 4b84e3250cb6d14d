"""Two demos: a simulated day with and without Trimtab (`show`), and captured telemetry of real engines (`recorded`).

Modules: scenario (the day, as values), day (plays it, minute by minute), score (the table's arithmetic), page (the
HTML report), show (three processes, the live lines, the table), story (what a tick's decision has to tell).
"""
