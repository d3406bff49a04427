# For sourcing, after farm.sh: Slurm on this machine, with nodes of its own.
#
#   slurm_begin NODES    a controller and so many nodes, n1 and on, with one job each; commands of Slurm find it
#   slurm_end            ends all of it

SLURM=()

slurm_install() {
    command -v slurmctld >/dev/null && command -v munged >/dev/null && return 0
    local install="apt-get install -y -qq --no-install-recommends slurm-wlm munge"
    export DEBIAN_FRONTEND=noninteractive
    $install >"$WORK/apt.log" 2>&1 || { apt-get update -qq && $install; } >>"$WORK/apt.log" 2>&1 || { tail "$WORK/apt.log"; return 1; }
}

# What the packages start by themselves is not needed: all files are in $WORK.
slurm_begin() {
    slurm_install || return 1
    local at host port=${SLURM_PORT:-17960} state=$WORK/slurm
    host=$(hostname -s)
    install -d -m 700 "$state" "$state/munge" "$state/state"
    # Others than root may come to the socket.
    chmod 711 "$WORK" "$state"
    install -d -m 755 "$state/run"
    (umask 077 && head -c 256 /dev/urandom >"$state/munge/key")
    munged --foreground --force --socket="$state/run/socket" --key-file="$state/munge/key" --pid-file="$state/munge/pid" \
        --log-file="$state/munge/log" --seed-file="$state/munge/seed" >"$state/munged.out" 2>&1 &
    SLURM+=($!)
    cat >"$state/slurm.conf" <<CONF
ClusterName=hayloft
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$state/run/socket
CredType=cred/munge
StateSaveLocation=$state/state
SlurmctldPidFile=$state/slurmctld.pid
SlurmctldLogFile=$state/slurmctld.log
SlurmdSpoolDir=$state/%n
SlurmdPidFile=$state/%n.pid
SlurmdLogFile=$state/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/linear
SchedulerType=sched/builtin
ReturnToService=2
KillWait=5
MinJobAge=2
UnkillableStepTimeout=60
CONF
    for at in $(seq "$1"); do
        echo "NodeName=n$at NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + at)) CPUs=$(nproc) State=UNKNOWN" >>"$state/slurm.conf"
        mkdir "$state/n$at"
    done
    echo "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP" >>"$state/slurm.conf"
    export SLURM_CONF=$state/slurm.conf
    for at in $(seq 50); do [ -S "$state/run/socket" ] && break; sleep 0.1; done
    slurmctld -D >"$state/slurmctld.out" 2>&1 &
    SLURM+=($!)
    for at in $(seq "$1"); do
        slurmd -D -N "n$at" >"$state/n$at.out" 2>&1 &
        SLURM+=($!)
    done
    for at in $(seq 200); do
        [ "$(sinfo --noheader --Node --format '%T' 2>/dev/null | grep -c idle)" = "$1" ] && return 0
        sleep 0.1
    done
    tail -n 5 "$state"/*.log "$state"/*.out
    return 1
}

slurm_end() {
    local pid
    [ "${#SLURM[@]}" = 0 ] || scancel --me --full --signal=KILL 2>/dev/null
    for pid in $(squeue --me --noheader --format=%A 2>/dev/null); do scancel "$pid"; done
    for at in $(seq 50); do [ -z "$(squeue --me --noheader 2>/dev/null)" ] && break; sleep 0.1; done
    for pid in "${SLURM[@]}"; do kill "$pid" 2>/dev/null; done
    for pid in "${SLURM[@]}"; do wait "$pid" 2>/dev/null; done
    SLURM=()
}
