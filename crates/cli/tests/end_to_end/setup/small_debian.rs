//! A base as small as can be that has dpkg and apt, from this host's programs, and an archive of packages in a folder.

use std::fs;
use std::path::{Path, PathBuf};

use crate::setup::farm::{run, sh};

/// Makes the base: programs with the libraries that they need, and a source of packages in `repository`.
const BASE: &str = r#"
base=$1 repository=$2
mkdir -p "$base/usr/bin" "$base/usr/sbin" "$base/usr/lib" "$base/usr/lib64" "$base/var/lib/dpkg/info" "$base/var/lib/dpkg/updates" \
    "$base/var/lib/dpkg/triggers" "$base/var/lib/apt/lists" "$base/var/cache" "$base/var/log/apt" "$base/etc/apt/apt.conf.d" "$base/etc/apt/preferences.d" "$base/root"
for name in bin sbin lib lib64; do ln -s usr/$name "$base/$name"; done
copy() {
    mkdir -p "$base$(dirname "$1")"
    cp -L "$1" "$base$1"
    ldd "$1" 2>/dev/null | grep -o '/[^ ]*' | while read -r library; do
        mkdir -p "$base$(dirname "$library")"
        [ -e "$base$library" ] || cp -L "$library" "$base$library"
    done
}
for name in sh apt-get dpkg dpkg-deb dpkg-query dpkg-split dpkg-trigger tar rm cat ls cp mv mkdir chmod touch sleep env chown diff; do copy "/usr/bin/$name"; done
for name in file copy store; do copy "/usr/lib/apt/methods/$name"; done
mkdir -p "$base/usr/share/dpkg"; cp /usr/share/dpkg/*table "$base/usr/share/dpkg/"
# dpkg looks whether they are there.
for name in ldconfig start-stop-daemon; do printf '#!/bin/sh\n' >"$base/usr/sbin/$name"; chmod 755 "$base/usr/sbin/$name"; done
: >"$base/var/lib/dpkg/status"
printf 'root:x:0:0::/root:/bin/sh\n' >"$base/etc/passwd"
printf 'root:x:0:\n' >"$base/etc/group"
printf 'deb [trusted=yes] file:%s ./\n' "$repository" >"$base/etc/apt/sources.list"
"#;

/// The base, and the packages that it finds.
pub(crate) struct SmallDebian {
    pub base: PathBuf,
    pub repository: PathBuf,
}

impl SmallDebian {
    pub(crate) fn new(dir: &Path) -> SmallDebian {
        let made = SmallDebian { base: dir.join("small-debian"), repository: dir.join("repository") };
        fs::create_dir_all(&made.repository).unwrap();
        run(sh(BASE).arg("-").arg(&made.base).arg(&made.repository));
        made
    }

    /// Adds a package with one file, which says its version: `/usr/share/NAME`; and more of a shell script that is run in the folder
    /// of the package.
    pub(crate) fn package(&self, name: &str, version: &str, more: &str) {
        let script = "work=$(mktemp -d); cd \"$work\"; mkdir -p p/DEBIAN p/usr/share
            printf 'Package: %s\\nVersion: %s\\nArchitecture: all\\nMaintainer: nobody\\nDescription: test\\n' \"$2\" \"$3\" >p/DEBIAN/control
            printf '%s %s\\n' \"$2\" \"$3\" >\"p/usr/share/$2\"
            cd p; eval \"$4\"; cd ..
            dpkg-deb -Znone --root-owner-group --build p \"$1/$2_$3.deb\" >/dev/null
            cd /; rm -r \"$work\"; cd \"$1\"; dpkg-scanpackages -m . >Packages 2>/dev/null";
        run(sh(script).arg("-").arg(&self.repository).args([name, version, more]));
    }

    /// Takes a version of a package out of the archive.
    pub(crate) fn withdraw(&self, name: &str, version: &str) {
        fs::remove_file(self.repository.join(format!("{name}_{version}.deb"))).unwrap();
        run(sh("cd \"$0\"; dpkg-scanpackages -m . >Packages 2>/dev/null").arg(&self.repository));
    }
}
