#!/bin/sh
# Installs the system programs that tests use: a real Prometheus. Never fails: tests that lack one skip and say so.
set -u

if command -v prometheus >/dev/null 2>&1 && command -v promtool >/dev/null 2>&1; then
    exit 0
fi

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "tests/packages.sh: installing prometheus, which the telemetry tests run against"
    log=$(mktemp)
    if DEBIAN_FRONTEND=noninteractive apt-get update -qq >"$log" 2>&1 \
        && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends prometheus >>"$log" 2>&1; then
        rm -f "$log"
        exit 0
    fi
    tail -n 5 "$log"
    rm -f "$log"
fi

cat <<'TEXT'
************************************************************************************************
tests/packages.sh: "prometheus" and "promtool" are not installed and could not be installed here.
The tests against a real Prometheus WILL BE SKIPPED. To run them: apt-get install prometheus
(as root), or put both programs of a Prometheus release, 2.40 or newer, into a folder of PATH.
************************************************************************************************
TEXT
exit 0
