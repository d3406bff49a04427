#!/usr/bin/env bash
# Sets everything up and runs all tests: format, lints, unit and end-to-end tests, the POSIX suite, real
# software, and a short run of the benchmarks. Ends with a line "N passed, N failed".
#
#   scripts/test.sh            everything
#   scripts/test.sh unit real  only these groups: lint unit posix real bench
#   scripts/test.sh --large    also what takes long (tests/real/), and the long form of the tests of sharing
#
# The output of each step is kept in target/test-output/.
set -uo pipefail
cd "$(dirname "$0")/.."

large=()
groups=()
for argument in "$@"; do
    case $argument in
        --large) large=(--large) && export HAYLOFT_TEST_LONG=1 ;;
        lint | unit | posix | real | bench) groups+=("$argument") ;;
        *) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 2 ;;
    esac
done
[ "${#groups[@]}" -gt 0 ] || groups=(lint unit posix real bench)

# Mounting, loop devices and chroot need root.
if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || { echo "the tests mount file systems: run this as root, or install sudo"; exit 1; }
    exec sudo --preserve-env=PATH,HOME,CARGO_HOME,RUSTUP_HOME,CI,HAYLOFT_TEST_LONG "$0" "$@"
fi

# One step may take so many seconds, and all of them together; whatever begins after that counts as failed.
patience=$([ "${#large[@]}" = 0 ] && echo 2700 || echo 36000)
deadline=$([ "${#large[@]}" = 0 ] && echo 4800 || echo 360000)

output=target/test-output
passed=0
failed=0
summary=()

count() { # NAME PASSED FAILED SECONDS
    passed=$((passed + $2))
    failed=$((failed + $3))
    summary+=("$(printf '%-34s %6s passed %4s failed %6s s' "$1" "$2" "$3" "$4")")
}

# Runs a command for so many seconds at most. What runs for longer is listed and ended, with all of its process group, and is
# not waited for: a process that hangs in the kernel must not take the other steps with it.
limited() { # SECONDS COMMAND...
    local limit=$1 command clock ended status
    shift
    set -m
    "$@" &
    command=$!
    sleep "$limit" >/dev/null 2>&1 &
    clock=$!
    set +m
    trap 'kill -TERM -- "-$command" "-$clock"; exit 130' HUP INT TERM
    wait -n -p ended "$command" "$clock"
    status=$?
    if [ "$ended" = "$clock" ]; then
        printf 'did not end within %s s; what runs:\n' "$limit"
        ps -eo pid,ppid,pgid,stat,etimes,wchan:24,args --forest | grep -v '\[.*\]$' | cut -c 1-200
        kill -TERM -- "-$command"
        timeout 30 tail --pid="$command" -f /dev/null
        kill -KILL -- "-$command" 2>/dev/null
        status=124
    else
        kill "$clock"
        wait "$clock" 2>/dev/null
    fi
    trap - HUP INT TERM
    return "$status"
}

log_of() { echo "$output/$(echo "$1" | tr ' /' '--').log"; } # NAME

# Runs one step, and tells what came of it.
step() { # NAME COMMAND...
    printf '== %s\n' "$1"
    run_step "$@"
    tell_step "$1"
}

# Steps of which each waits more than it computes, two at a time: lines of a name, | and a command without quotes. Each side has
# mounts of its own: namespaces that one script makes would keep what the other one has mounted.
two_at_a_time() {
    local name command
    cat >"$output/queue"
    exec 3<"$output/queue"
    export -f side run_step limited log_of
    export output deadline patience
    trap 'kill $(jobs -p); exit 130' HUP INT TERM
    unshare --mount --propagation private bash -c "side $SECONDS" &
    unshare --mount --propagation private bash -c "side $SECONDS" &
    wait
    trap - HUP INT TERM
    exec 3<&-
    while IFS='|' read -r name command; do tell_step "$name"; done <"$output/queue"
}

# Both read on in the same file, one at a time.
side() { # SECONDS SO FAR
    local name command
    SECONDS=$1
    exec 4<"$output/queue"
    while flock 4 && IFS='|' read -r name command <&3; do
        flock -u 4
        printf '== %s\n' "$name"
        # shellcheck disable=SC2086
        run_step "$name" $command 3<&- 4<&-
    done
}

# Its output goes to its log; beside that stands how it ended, and how many seconds it took.
run_step() { # NAME COMMAND...
    local log start limit status
    log=$(log_of "$1")
    shift
    start=$SECONDS
    limit=$((deadline - start < patience ? deadline - start : patience))
    if [ "$limit" -lt 10 ]; then
        echo "there was no time left for it" >"$log"
        status=124
    else
        limited "$limit" "$@" >"$log" 2>&1 </dev/null
        status=$?
    fi
    echo "$status $((SECONDS - start))" >"$log.ended"
}

# Its own lines "N passed, N failed" are added up, or without any cargo's "N passed; N failed" (a script counts for itself what
# the cargo that it runs has done), and a step without either counts as one test.
tell_step() { # NAME
    local name=$1 log status seconds counts
    log=$(log_of "$name")
    read -r status seconds <"$log.ended"
    rm "$log.ended"
    counts=$(sed -nE 's/^([0-9]+) passed, ([0-9]+) failed.*/own \1 \2/p
            s/^test result: [a-zA-Z]+\. ([0-9]+) passed; ([0-9]+) failed.*/cargo \1 \2/p' "$log" |
        awk '{ n[$1]++; p[$1] += $2; f[$1] += $3 }
            END { of = n["own"] ? "own" : "cargo"; if (n[of]) print p[of], f[of] }')
    [ -n "$counts" ] || counts=$([ "$status" = 0 ] && echo "1 0" || echo "0 1")
    # A step that ended badly without a failed test has failed all the same.
    if [ "$status" != 0 ] && [ "${counts#* }" = 0 ]; then counts="${counts% *} 1"; fi
    # shellcheck disable=SC2086
    count "$name" $counts "$seconds"
    summary+=("$(sed -nE 's/^passed at the second try: /    at the second try: /p; s/^left behind by a test: /    left behind: /p' "$log")")
    if [ "$status" != 0 ]; then
        what_failed "$log" | head -n 100 | cut -c 1-400 | sed 's/^/   | /'
        printf '   FAILED (%s); all of it: %s\n' "$status" "$log"
        # In the summary too: of a long output often only a part is kept.
        summary+=("$(sed -nE 's/^test (.*) \.\.\. FAILED$/    failed: \1/p; s/^thread .* panicked at /    at: /p' "$log" |
            head -n 20 | cut -c 1-160)")
    fi
}

# Cargo's tests. A test of real mounts that fails while a hundred others run may have failed for want of time: up to three are
# tried once more, alone, and named in the summary either way.
cargo_tests() {
    local first=$output/first-try.log end=$((SECONDS + limit - 60)) failed name mended=0 status counts
    # Into a file: the end of a pipe would be waited for as long as a process lives that a test has left behind.
    # Tests wait as much as they compute.
    RUST_TEST_THREADS=$(($(nproc) + 1)) limited $((end - SECONDS)) cargo test --release --workspace --no-fail-fast >"$first" 2>&1
    status=$?
    cat "$first"
    left_behind "$first"
    [ "$status" != 0 ] || return 0
    if [ "$status" = 124 ]; then
        echo "these had begun and not ended:"
        sed -nE 's/^test (.*) has been running for over 60 seconds$/\1/p' "$first" | sort -u |
            while read -r name; do grep -qE "^test $name \.\.\. (ok|FAILED)" "$first" || echo "test $name ... FAILED"; done
        return 124
    fi
    mapfile -t failed < <(sed -nE 's/^test (.*) \.\.\. FAILED$/\1/p' "$first")
    if [ "${#failed[@]}" = 0 ] || [ "${#failed[@]}" -gt 3 ]; then return "$status"; fi
    for name in "${failed[@]}"; do
        if limited $((end - SECONDS)) cargo test --release --workspace --no-fail-fast -- --exact "$name" >"$first.again" 2>&1; then
            mended=$((mended + 1))
            printf 'passed at the second try: %s\n' "$name"
        fi
        sed 's/^test result:/second try:/' "$first.again"
        left_behind "$first.again"
    done
    counts=$(sed -nE 's/^test result: [a-zA-Z]+\. ([0-9]+) passed; ([0-9]+) failed.*/\1 \2/p' "$first" |
        awk '{ p += $1; f += $2 } END { print p, f }')
    printf '%s passed, %s failed\n' $((${counts% *} + mended)) $((${counts#* } - mended))
    [ "$mended" = "${#failed[@]}" ]
}

# Names and ends the processes that tests have left behind: they still write to the output.
left_behind() { # FILE
    local file pid
    file=$(realpath "$1")
    find /proc/[0-9]*/fd -maxdepth 1 -lname "$file" 2>/dev/null | cut -d/ -f3 | sort -un | while read -r pid; do
        [ "$pid" != "$$" ] && [ -r "/proc/$pid/cmdline" ] || continue
        printf 'left behind by a test: %s\n' "$(tr '\0' ' ' <"/proc/$pid/cmdline")"
        kill -9 "$pid"
    done
}

# What the output of a failed step says of what failed: of cargo's tests all that they printed, else its last lines.
what_failed() { # LOG
    if grep -q '^failures:$' "$1"; then
        awk '/^failures:$/ { told = 1 } /^test result:/ { told = 0 } told' "$1"
    else
        tail -n 60 "$1"
    fi
}

has() { [[ " ${groups[*]} " == *" $1 "* ]]; }

# Setting up is a test as well: it must work on a fresh machine.
mkdir -p "$output"
step setup scripts/setup.sh
[ "$failed" = 0 ] || { echo "$passed passed, $failed failed"; exit 1; }
[ ! -f "$HOME/.cargo/env" ] || . "$HOME/.cargo/env"

if has lint; then
    step "format" cargo fmt --all --check
    step "lints" cargo clippy --release --workspace --all-targets -- -D warnings
    step "format of bench" cargo fmt --manifest-path bench/Cargo.toml --all --check
    step "lints of bench" cargo clippy --release --manifest-path bench/Cargo.toml --workspace --all-targets -- -D warnings
    step "documentation" env RUSTDOCFLAGS="-D warnings" cargo doc --release --workspace --no-deps
fi
if has unit; then
    step "unit and end-to-end tests" cargo_tests
fi
# What the tests have built can be killed at crash points: the rest is for the program as it is released.
step "the program as it is released" cargo build --release --workspace
if has posix; then
    step "POSIX suite (pjdfstest)" tests/pjdfstest.sh
fi
if has real; then
    two_at_a_time < <(
        for script in tests/real/[a-z]*.sh; do
            printf 'real %s|%s\n' "$(basename "$script" .sh)" "$script ${large[*]}"
        done
    )
fi
if has bench; then
    two_at_a_time <<'END'
benchmark, short|bench/run.sh --smoke --workloads tree,cold,build,shared,make,many --store-delay 5
benchmark of slow links, short|bench/run.sh --smoke --workloads tree,build,shared,make --rtt 0,1
benchmark of roots, short|bench/roots.sh --smoke
benchmark of many hosts, short|bench/headline.sh --smoke --compare
benchmark of versions, short|bench/versions.sh --smoke
benchmark of send and receive, short|bench/transfer.sh --smoke
benchmark of pull, short|bench/pull.sh --smoke
END
fi

printf '\n'
printf '%s\n' "${summary[@]}" | sed '/^$/d'
printf '\n%s passed, %s failed\n' "$passed" "$failed"
[ "$failed" = 0 ]
