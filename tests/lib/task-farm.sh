# For sourcing, after farm.sh: a build farm of two hosts, and the local disk to compare with.
#
#   task_farm PORT      one volume on three mounts, and a folder on the local disk; all are seen as $TREE: of the local
#                       disk ($WORK/local) on host 0, of the volume (${MNTS[0]}) on host 1; agents have the other mounts
#   farm_begin          starts the broker and both agents, and waits for them
#   farm_broker, farm_agent 1|2    start one of them again
#   on_local, on_volume COMMAND... run something there, in $TREE
#   products DIR [FIND ARGUMENTS]  all files with their hashes, but for what hayloft make remembers
#   same_products DIR [FIND ARGUMENTS]  whether this folder of both trees has the same, as the second agent's mount sees it

task_farm() {
    farm_hosts 3
    export LC_ALL=C HAYLOFT_CONFIG=/dev/null HAYLOFT_BROKER=nats://127.0.0.1:$1
    unset MAKEFLAGS
    PORT=$1
    TREE=$WORK/tree
    AGENTS=()
    BROKER=
    mkdir "$WORK/local" "$TREE"
    farm_namespace "$WORK/local" "$TREE"
    farm_namespace "${MNTS[0]}" "$TREE"
    trap 'farm_end; farm_stop' EXIT
}

farm_broker() {
    nats-server -a 127.0.0.1 -p "$PORT" >>"$WORK/nats.log" 2>&1 &
    BROKER=$!
}

farm_agent() { # NUMBER
    setsid "$HAYLOFT" farm agent --slots 4 --name "h$1" --mount "${MNTS[$1]}" --allow-root --lease 4 >>"$WORK/agent$1.log" 2>&1 &
    AGENTS[$1]=$!
}

farm_end() {
    local pid
    for pid in $BROKER "${AGENTS[@]}"; do kill "$pid" 2>/dev/null; done
    for pid in $BROKER "${AGENTS[@]}"; do wait "$pid" 2>/dev/null; done
}

farm_begin() {
    farm_broker
    sleep 0.5
    farm_agent 1
    farm_agent 2
    local tries
    for tries in $(seq 100); do
        [ "$("$HAYLOFT" farm status --json 2>/dev/null | grep -c '"host"')" = 2 ] && return 0
        sleep 0.1
    done
    return 1
}

# shellcheck disable=SC2016
on_local() { on_host 0 sh -euc 'cd "$1"; shift; exec "$@"' sh "$TREE" "$@"; }
# shellcheck disable=SC2016
on_volume() { on_host 1 sh -euc 'cd "$1"; shift; exec "$@"' sh "$TREE" "$@"; }

products() {
    local dir=$1
    shift
    (cd "$dir" && find . -type f ! -name .hayloft-history "$@" -print0 | sort -z | xargs -0 sha256sum)
}

same_products() {
    local dir=$1
    shift
    products "$WORK/local/$dir" "$@" >"$WORK/products.local"
    test -s "$WORK/products.local" || return 1
    products "${MNTS[2]}/$dir" "$@" | diff "$WORK/products.local" - | head -n 10
    test "${PIPESTATUS[1]}" = 0
}
