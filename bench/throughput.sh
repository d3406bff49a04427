#!/bin/bash
# The throughput of a file of 512 MiB that is written, synced, and read from a fresh mount, in two folders in turn. For scripts that have set
# `work` (a folder in which KIND is mounted on work/KIND), `hayloft` (the program) and `mount_anew KIND`, which unmounts and mounts it.
#   throughput ROUNDS KIND KIND
throughput() {
    local rounds=$1 first=$2 second=$3 round kind begun written opened
    head -c 536870912 /dev/urandom >"$work/data"
    cat "$work/data" >/dev/null
    for round in $(seq "$rounds"); do
        for kind in "$first" "$second"; do
            begun=$(date +%s%N)
            dd if="$work/data" of="$work/$kind/data" bs=1M conv=fsync 2>/dev/null
            written=$(date +%s%N)
            mount_anew "$kind"
            opened=$(date +%s%N)
            dd if="$work/$kind/data" of=/dev/null bs=1M 2>/dev/null
            echo "$round $kind $((written - begun)) $(($(date +%s%N) - opened))" >>"$work/times"
            rm "$work/$kind/data"
            "$hayloft" sync "$work/$kind"
        done
    done
    python3 bench/throughput.py "$work/times" "$first" "$second"
}
