//! Files that are in memory on one host while others write into them.

use std::fs::{self, File, OpenOptions};
use std::io::Write;

use crate::setup::calls::Map;
use crate::setup::farm::{Farm, rounds};

/// What one host writes first, and another one behind that.
const LEN: usize = 100;

#[test]
fn what_others_have_appended_stays_when_the_page_before_it_is_stored_into() {
    let (_farm, mounts) = Farm::shared(3);
    for round in 0..rounds(10, 100) {
        let name = format!("file-{round}");
        let path = mounts[0].join(&name);
        let is_everywhere = |expected: &[u8]| {
            for mount in &mounts {
                assert_eq!(
                    fs::read(mount.join(&name)).unwrap(),
                    expected,
                    "round {round}, {}",
                    mount.path().display()
                );
            }
        };
        fs::write(&path, [b'a'; LEN]).unwrap();
        let here: File = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let mut map = Map::new(&here, LEN, libc::MAP_SHARED);
        assert_eq!(map.bytes()[0], b'a');
        let mut there = OpenOptions::new().append(true).open(mounts[1].join(&name)).unwrap();
        there.write_all(&[b'b'; LEN]).unwrap();
        // This host's kernel has not been asked how long the file is now, and fills the page behind what it knows with zeros.
        map.bytes()[..5].copy_from_slice(b"STORE");
        map.sync();
        let expected = [b"STORE".as_slice(), &[b'a'; LEN - 5], &[b'b'; LEN]].concat();
        is_everywhere(&expected);
        // Now it has.
        map.bytes()[6] = b'X';
        map.sync();
        let expected = [&expected[..6], b"X", &expected[7..]].concat();
        is_everywhere(&expected);
    }
}
