#!/bin/sh
# A shell for make (SHELL=...): runs each recipe on another host, in the same folder there.
#
# $ROUND_ROBIN is the list of the hosts' processes (see farm_namespaces in farm.sh); $ROUND_ROBIN_LOG gets a line
# with the host's number for each recipe.
hosts=0
for pid in $ROUND_ROBIN; do hosts=$((hosts + 1)); done
turn=$(($$ % hosts))
echo "$turn" >> "$ROUND_ROBIN_LOG"
for pid in $ROUND_ROBIN; do
    [ "$turn" != 0 ] || break
    turn=$((turn - 1))
done
# The folder is entered there: a working directory would stay on the host that it was entered on.
# shellcheck disable=SC2016
exec nsenter --mount="/proc/$pid/ns/mnt" /bin/sh -c 'cd "$0" && exec /bin/sh "$@"' "$PWD" "$@"
