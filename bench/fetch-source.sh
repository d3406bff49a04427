#!/bin/bash
# Fetches the source of a Debian package, without changing the system's apt configuration or lists.
#
#   fetch-source.sh PACKAGE DEST
#
# Prints two absolute paths in DEST: the .dsc and the upstream tarball. Fetches nothing if they are there already.
# Works as root and as any user. The archives are those that this machine already uses for Debian itself.
#
# Example:
#   bench/fetch-source.sh hello ~/.cache/hayloft-bench
set -euo pipefail
export LC_ALL=C

fail() {
    echo "fetch-source.sh: $*" >&2
    exit 1
}

# The tarball that a .dsc names: upstream's, or the only one of a native package.
tarball_of() {
    awk '/^Files:/ { files = 1; next } /^[^ ]/ { files = 0 } files { print $3 }' "$1" |
        grep -E '\.tar\.[a-z0-9]+$' | grep -vE '\.debian\.tar\.|\.orig-[^.]+\.tar\.' | head -n 1
}

# Prints the paths and succeeds if everything is there.
print_fetched() {
    local dsc tarball
    dsc=$(find "$dest" -maxdepth 1 -name "${package}_*.dsc" | sort -V | tail -n 1)
    [[ -n $dsc ]] || return 1
    tarball=$dest/$(tarball_of "$dsc")
    [[ -f $tarball ]] || return 1
    printf '%s\n' "$dsc" "$tarball"
}

# Reads stanzas or lines of apt sources; writes deb-src stanzas for those that are Debian's: of a suite of Debian,
# with a component `main`. Other vendors' archives have other names for one or the other.
#
# An awk for each of the two formats: sources.list(5).
from_stanzas() {
    awk -v suite_pattern="$suite_pattern" '
        function emit(    n, i, names, suites) {
            n = split(field["suites"], names, /[ \t\n]+/)
            for (i = 1; i <= n; i++) if (names[i] ~ suite_pattern) suites = suites " " names[i]
            if (suites != "" && (" " field["components"] " ") ~ /[ \t\n]main[ \t\n]/ &&
                (" " field["types"] " ") ~ /[ \t\n]deb(-src)?[ \t\n]/ && tolower(field["enabled"]) !~ /no|false|off|0/) {
                print "Types: deb-src\nURIs:" field["uris"] "\nSuites:" suites "\nComponents: main"
                if ("signed-by" in field) print "Signed-By:" field["signed-by"]
                print ""
            }
            delete field
            name = ""
        }
        /^#/ { next }
        /^[ \t]*$/ { emit(); next }
        /^[ \t]/ { if (name != "") field[name] = field[name] "\n" $0; next }
        { colon = index($0, ":"); name = tolower(substr($0, 1, colon - 1)); field[name] = substr($0, colon + 1) }
        END { emit() }
    ' "$1"
}

from_lines() {
    awk -v suite_pattern="$suite_pattern" '
        { sub(/#.*/, "") }
        $1 !~ /^deb(-src)?$/ { next }
        {
            signed = ""
            line = $0
            if (match(line, /\[[^]]*\]/)) {
                options = substr(line, RSTART + 1, RLENGTH - 2)
                line = substr(line, 1, RSTART - 1) substr(line, RSTART + RLENGTH)
                if (match(options, /signed-by=[^ ]+/)) signed = substr(options, RSTART + 10, RLENGTH - 10)
            }
            n = split(line, word)
            for (i = 4; i <= n; i++) if (word[i] == "main" && word[3] ~ suite_pattern && !seen[word[2], word[3]]++) {
                print "Types: deb-src\nURIs: " word[2] "\nSuites: " word[3] "\nComponents: main"
                if (signed != "") { gsub(/,/, " ", signed); print "Signed-By: " signed }
                print ""
            }
        }
    ' "$1"
}

[[ $# == 2 ]] || {
    echo "usage: fetch-source.sh PACKAGE DEST" >&2
    exit 2
}
package=$1
[[ $package =~ ^[a-z0-9][a-z0-9+.-]+$ ]] || fail "not a package name: $package"
mkdir -p "$2" || fail "cannot create $2"
[[ -w $2 ]] || fail "cannot write to $2"
dest=$(cd "$2" && pwd)
print_fetched && exit

command -v apt-get >/dev/null ||
    fail "apt-get is not here: this needs Debian or a derivative; put ${package}_VERSION.dsc and its tarball in $dest instead"

state=$(mktemp -d)
trap 'rm -rf "$state"' EXIT
mkdir -p "$state/sources.d" "$state/lists/partial" "$state/cache/archives/partial"
names='stable|oldstable|oldoldstable|testing|unstable|sid|experimental|buster|bullseye|bookworm|trixie|forky|duke'
codename=$(. /etc/os-release 2>/dev/null && echo "${VERSION_CODENAME:-}")
suite_pattern="^(${codename:-stable}|$names)(-updates|-security|-backports|-proposed-updates|/updates)?\$"
sources=$state/sources.d/debian.sources
shopt -s nullglob
for file in /etc/apt/sources.list.d/*.sources; do from_stanzas "$file"; done >"$sources"
for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
    if [[ -r $file ]]; then from_lines "$file"; fi
done >>"$sources"
[[ -s $sources ]] || fail "the apt sources of this machine name no suite of Debian with a component main"

# Read after the system's configuration (for its proxies), so what it says about places and hooks is replaced.
cat >"$state/apt.conf" <<CONF
Dir::Etc::sourcelist "/dev/null";
Dir::Etc::sourceparts "$state/sources.d";
Dir::State "$state";
Dir::State::lists "$state/lists";
Dir::State::status "/var/lib/dpkg/status";
Dir::Cache "$state/cache";
APT::Sandbox::User "$(id -un)";
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
CONF
cd "$dest"
apt-get -c "$state/apt.conf" -q update >"$state/log" 2>&1 || {
    tail -n 5 "$state/log" >&2
    fail "apt-get update failed"
}
apt-get -c "$state/apt.conf" -q source --download-only "$package" >"$state/log" 2>&1 || {
    tail -n 5 "$state/log" >&2
    fail "apt-get source $package failed"
}
print_fetched || fail "apt-get source $package left no .dsc with its tarball in $dest"
