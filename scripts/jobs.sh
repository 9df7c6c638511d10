# Sourced by scripts that run others.
#
# `attended COMMAND ...` runs a command or a function, and `start COMMAND ...` does so in the
# background. A signal then ends this script at once, and all that it has started: by itself bash
# would first wait for the command, or end alone. What is still there after ten seconds is killed:
# torchrun may lose the signal, or end without its ranks if it has just started them.
#
# `aside COMMAND ...` is `start` with the output in a file in the folder $logs. `finish` waits for
# these jobs, shows what each wrote, and fails if one of them did.

token=started-by-$$-$RANDOM
export TITAN_FP8_STARTED_BY=${TITAN_FP8_STARTED_BY:-}:$token # marks whatever runs below this script

catch_signals() {
    trap 'end_jobs 1' HUP
    trap 'end_jobs 2' INT
    trap 'end_jobs 15' TERM
}

end_jobs() { # SIGNAL
    local job file
    trap '' HUP INT TERM
    for job in $(jobs -p); do
        kill -TERM -- "-$job" 2>/dev/null || true # torchrun ends its ranks
    done
    for _ in {1..100}; do
        [[ -n $(jobs -rp) ]] || break
        sleep 0.1
    done
    if [[ $BASHPID == "$$" ]]; then # the script, not one of its jobs
        for file in $(grep -slzF "$token" /proc/[0-9]*/environ); do
            kill -KILL "${file//[!0-9]/}" 2>/dev/null || true
        done
    fi
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

asides=()
aside() {
    start "$@" >"$logs/${#asides[@]}" 2>&1
    asides+=("$! $*")
}

finish() {
    local i failed=0
    for i in "${!asides[@]}"; do
        wait "${asides[i]%% *}" || failed=1
        echo "== ${asides[i]#* }"
        cat "$logs/$i"
    done
    return $failed
}

catch_signals
