#!/usr/bin/env bash
# Agents as jobs of Slurm, with a controller and three nodes on this machine: a build without any host has hosts come, quiet has them go;
# a job that is cancelled loses nothing. With --large also one that is killed, one that is to end, and a script that cannot run.
set -uo pipefail
. "$(dirname "$0")/../lib/farm.sh"
. "$(dirname "$0")/../lib/task-farm.sh"
. "$(dirname "$0")/../lib/slurm.sh"
task_farm "${FARM_PORT:-17981}"
trap 'status=$?; scale_end; slurm_end; farm_end; (exit $status); farm_stop' EXIT
SCALE=
PROJECT=${MNTS[0]}/p

# A recipe says in a file of its own that it ran, and so how often.
project() {
    mkdir "$PROJECT" && printf '%s\n' 'ALL := $(addsuffix .out,$(shell seq 1 $(COUNT)))' 'all: $(ALL)' \
        '%.out:' '	@echo ran >> ran.$*; sleep 1.2; cat *.txt > $@' >"$PROJECT/Makefile" && echo text >"$PROJECT/a.txt"
    # Mounts of nodes: n1 has the second one, and so on.
    cat >"$WORK/agent.sh" <<SH
#!/bin/sh
case \$SLURMD_NODENAME in n1) at=${MNTS[1]} ;; n2) at=${MNTS[2]} ;; *) at=${MNTS[3]} ;; esac
exec "$HAYLOFT" farm agent --grace 20 --name \$SLURMD_NODENAME --mount \$at --allow-root --lease 4
SH
}
begin() { slurm_begin 3 && farm_broker; }
scale_begin() { # SCRIPT
    (cd "$WORK" && exec "$HAYLOFT" farm slurm --max 3 --slots 2 --grow-after 1 --shrink-after 4 -- --output="$WORK/agent.%j.log" "$1") \
        >>"$WORK/scale.log" 2>&1 &
    SCALE=$!
}
scale_end() {
    [ -z "$SCALE" ] || { kill "$SCALE" && wait "$SCALE"; } 2>/dev/null
    SCALE=
}
jobs() { squeue --me --noheader --format=%A --states=RUNNING; }
until_busy() {
    local tries
    for tries in $(seq 150); do
        "$HAYLOFT" farm status --json 2>/dev/null |
            python3 -c 'import json, sys; sys.exit(sum(h["tasks"] for h in json.load(sys.stdin)["hosts"]) < 3)' 2>/dev/null && return 0
        sleep 0.1
    done
    return 1
}
# COUNT SECONDS: so many jobs run, or more; for 0 none.
until_jobs() {
    local tries there
    for tries in $(seq $(($2 * 5))); do
        there=$(jobs | wc -l)
        [ "$there" -lt "$1" ] || { [ "$1" = 0 ] && [ "$there" != 0 ]; } || return 0
        sleep 0.2
    done
    squeue
    tail -n 5 "$WORK/scale.log"
    return 1
}
make_begin() { # COUNT
    rm -f "$PROJECT"/*.out "$PROJECT"/ran.*
    on_volume "$HAYLOFT" make --summary -C p -j6 COUNT="$1" >"$WORK/make.log" 2>&1 &
    MAKE=$!
}
# COUNT [MOST]: the build is well, all of it ran on the farm, no recipe more often than MOST.
make_ends() {
    wait "$MAKE" || { tail -n 20 "$WORK/make.log"; return 1; }
    sed -n 's/^hayloft make:/  &/p' "$WORK/make.log"
    grep -q "$1 recipes on the farm, 0 here" "$WORK/make.log" && [ "$(cat "$PROJECT"/*.out | grep -c '^text$')" = "$1" ] &&
        [ "$(cat "$PROJECT"/ran.* | wc -l)" -le $(($1 * ${2:-1})) ]
}
first_build() {
    make_begin 18
    until_jobs 3 30 && make_ends 18
}
quiet() { until_jobs 0 40; }
# SCANCEL ARGUMENTS: for a job that runs something.
cancel_one() {
    make_begin 18
    until_jobs 2 30 && until_busy || return 1
    scancel "$@" "$(jobs | head -n 1)" && make_ends 18 2
}
drained() {
    make_begin 18
    until_jobs 2 30 && until_busy || return 1
    # As before the end of its time, with --signal=B:TERM@20.
    scancel --batch --signal=TERM "$(jobs | head -n 1)" && make_ends 18
}
broken() {
    scale_end
    printf '#!/bin/sh\nexit 1\n' >"$WORK/broken.sh"
    local before
    before=$(squeue --me --noheader | wc -l)
    : >"$WORK/scale.log"
    scale_begin "$WORK/broken.sh"
    on_volume timeout 12 "$HAYLOFT" task --farm -- true >"$WORK/task.log" 2>&1
    local tried
    tried=$(grep -c 'submitted job' "$WORK/scale.log")
    echo "   submitted $tried times in 12 s"
    [ "$before" = 0 ] && [ "$tried" -ge 1 ] && [ "$tried" -le 3 ]
}

# One mount more, for the third node.
farm_third() { mkdir "$WORK/mnt3" && MNTS+=("$WORK/mnt3") && farm_mount_on "$WORK/mnt3"; }
check "a controller and three nodes, a broker, no host" begin
check "a mount for each node" farm_third
check "a project" project
[ "$FAILED" = 0 ] || { report; exit 1; }
scale_begin "$WORK/agent.sh"
check "a build has three hosts come, and runs on them" first_build
check "a job that is cancelled loses nothing" cancel_one
[ "${1:-}" != --large ] || check "a job that is to end finishes what it runs: nothing ran twice" drained
[ "${1:-}" != --large ] || check "a job that is killed loses nothing" cancel_one --signal=KILL --full
check "quiet has them go" quiet
[ "${1:-}" != --large ] || check "a script that cannot run is not tried without end" broken
report
