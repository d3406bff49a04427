#!/usr/bin/env bash
# cargo on a volume: a small program with a library, a build script and tests; built, changed, built again.
set -uo pipefail
. "$(dirname "$0")/../lib/farm.sh"
farm_start
unset CARGO_TARGET_DIR RUSTFLAGS

create() {
    cargo init -q --vcs none --name sample "$MNT/sample" && cd "$MNT/sample" || return 1
    cat > build.rs <<'RS'
fn main() {
    let out = std::env::var("OUT_DIR").unwrap();
    std::fs::write(format!("{out}/table.rs"), format!("pub const TABLE: [u32; 4] = {:?};", [1, 2, 3, 4])).unwrap();
    println!("cargo::rerun-if-changed=build.rs");
}
RS
    cat > src/lib.rs <<'RS'
include!(concat!(env!("OUT_DIR"), "/table.rs"));
pub fn sum() -> u32 { TABLE.iter().sum() }
#[test]
fn sums() { assert_eq!(sum(), 10); }
RS
    echo 'fn main() { println!("{}", sample::sum()); }' > src/main.rs
}
build() { cd "$MNT/sample" && cargo build -q --offline && test "$(target/debug/sample)" = 10; }
tests() { cd "$MNT/sample" && cargo test -q --offline; }
fresh() { cd "$MNT/sample" && ! cargo build --offline 2>&1 | grep -q Compiling; }
change() {
    cd "$MNT/sample" && echo 'fn main() { println!("new {}", sample::sum()); }' > src/main.rs &&
        cargo build -q --offline && test "$(target/debug/sample)" = "new 10"
}
release() { cd "$MNT/sample" && cargo build -q --release --offline && test "$(target/release/sample)" = "new 10"; }

check "a new package" create
check "build" build
check "tests" tests
check "nothing to build" fresh
check "a change is built" change
check "remount" farm_remount
check "nothing to build after a remount" fresh
check "release build" release
check "clean" cargo clean --manifest-path "$MNT/sample/Cargo.toml"
report
