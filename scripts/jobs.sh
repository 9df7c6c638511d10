# Sourced by scripts that run others.
#
# `attended COMMAND ...` runs a command or a function, and `start COMMAND ...` does so in the
# background. A signal then ends this script at once, and all that it has started: by itself bash
# would first wait for the command, or end alone.

catch_signals() {
    trap 'end_jobs 1' HUP
    trap 'end_jobs 2' INT
    trap 'end_jobs 15' TERM
}

end_jobs() { # SIGNAL
    local job
    trap '' HUP INT TERM
    for job in $(jobs -p); do
        kill -TERM -- "-$job" 2>/dev/null || true # torchrun ends its ranks
    done
    wait
    exit $((128 + $1))
}

start() {
    set -m # in a process group of its own
    { catch_signals; "$@"; } &
    set +m
}

attended() {
    start "$@"
    wait $!
}

catch_signals
