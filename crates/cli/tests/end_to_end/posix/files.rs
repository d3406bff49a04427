//! Files: how they are opened, written, mapped, and live on without a name.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::Command;

use crate::setup::calls::{self, Map, errno};
use crate::setup::farm::{Place, run, sh};

#[test]
fn open_flags() {
    let place = Place::new();
    let path = place.join("file");
    fs::write(&path, b"content").unwrap();
    assert_eq!(errno(calls::open(&path, libc::O_CREAT | libc::O_EXCL | libc::O_RDWR, 0o644)), libc::EEXIST);
    assert_eq!(errno(calls::open(&path, libc::O_DIRECTORY, 0)), libc::ENOTDIR);
    calls::open(&path, libc::O_WRONLY | libc::O_TRUNC, 0).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), 0);
    std::os::unix::fs::symlink("file", place.join("link")).unwrap();
    assert_eq!(errno(calls::open(&place.join("link"), libc::O_NOFOLLOW, 0)), libc::ELOOP);
    assert_eq!(errno(calls::open(place.path(), libc::O_WRONLY, 0)), libc::EISDIR);
    assert_eq!(errno(calls::open(&place.join("none"), libc::O_RDONLY, 0)), libc::ENOENT);
}

#[test]
fn a_second_truncation_moves_the_time() {
    let place = Place::new();
    let path = place.join("empty");
    File::create(&path).unwrap();
    let before = fs::metadata(&path).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(30));
    calls::open(&path, libc::O_WRONLY | libc::O_TRUNC, 0).unwrap();
    let after = fs::metadata(&path).unwrap();
    assert!((after.mtime(), after.mtime_nsec()) > (before.mtime(), before.mtime_nsec()));
}

#[test]
fn o_tmpfile_has_no_name_until_it_is_linked() {
    let mut place = Place::new();
    let mut file = calls::open(place.path(), libc::O_TMPFILE | libc::O_RDWR, 0o640).unwrap();
    file.write_all(b"unnamed").unwrap();
    assert_eq!(file.metadata().unwrap().nlink(), 0);
    assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0);
    calls::link_fd(&file, &place.join("named")).unwrap();
    assert_eq!(file.metadata().unwrap().nlink(), 1);
    // This one is never named, and has to leave nothing behind.
    let mut lost = calls::open(place.path(), libc::O_TMPFILE | libc::O_RDWR, 0o600).unwrap();
    lost.write_all(b"gone").unwrap();
    drop((file, lost));
    place.remount();
    assert_eq!(fs::read(place.join("named")).unwrap(), b"unnamed");
    assert_eq!(fs::read_dir(place.path()).unwrap().count(), 1);
}

#[test]
fn appends_go_to_the_end_whoever_wrote_it() {
    let place = Place::new();
    let path = place.join("log");
    let writers: Vec<_> = (0..4u8)
        .map(|writer| {
            let mut file = File::options().append(true).create(true).open(&path).unwrap();
            std::thread::spawn(move || (0..200).for_each(|_| file.write_all(&[b'a' + writer; 10]).unwrap()))
        })
        .collect();
    writers.into_iter().for_each(|writer| writer.join().unwrap());
    let content = fs::read(&path).unwrap();
    assert_eq!(content.len(), 8000);
    assert!(content.chunks(10).all(|record| record.iter().all(|byte| *byte == record[0])), "torn records");
}

#[test]
fn sparse_files() {
    let mut place = Place::new();
    let path = place.join("sparse");
    let file = File::create(&path).unwrap();
    file.write_all_at(b"start", 0).unwrap();
    file.write_all_at(b"end", 10 << 20).unwrap();
    file.set_len(20 << 20).unwrap();
    drop(file);
    place.remount();
    let info = fs::metadata(&path).unwrap();
    assert_eq!(info.len(), 20 << 20);
    assert!(info.blocks() * 512 < 2 << 20, "{} blocks", info.blocks());
    let file = File::open(&path).unwrap();
    let mut bytes = [1; 16];
    file.read_exact_at(&mut bytes, 5 << 20).unwrap();
    assert_eq!(bytes, [0; 16]);
    file.read_exact_at(&mut bytes[..3], 10 << 20).unwrap();
    assert_eq!(&bytes[..3], b"end");
    let hole = calls::seek(&file, 0, libc::SEEK_HOLE).unwrap();
    assert!((5..=20 << 20).contains(&hole), "{hole}");
    let data = calls::seek(&file, 10 << 20, libc::SEEK_DATA).unwrap();
    assert_eq!(data, 10 << 20);
    assert_eq!(errno(calls::seek(&file, 21 << 20, libc::SEEK_DATA)), libc::ENXIO);
}

#[test]
fn truncate_forgets_what_was_behind() {
    let mut place = Place::new();
    let path = place.join("file");
    fs::write(&path, vec![7; 300_000]).unwrap();
    let file = File::options().write(true).open(&path).unwrap();
    file.set_len(1000).unwrap();
    file.set_len(200_000).unwrap();
    drop(file);
    for _ in 0..2 {
        let content = fs::read(&path).unwrap();
        assert_eq!(content.len(), 200_000);
        assert!(
            content[..1000].iter().all(|byte| *byte == 7) && content[1000..].iter().all(|byte| *byte == 0)
        );
        place.remount();
    }
}

#[test]
fn fallocate_modes() {
    let mut place = Place::new();
    let path = place.join("file");
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    calls::fallocate(&file, 0, 0, 100_000).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 100_000);
    calls::fallocate(&file, libc::FALLOC_FL_KEEP_SIZE, 0, 200_000).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 100_000);
    file.write_all_at(&[9; 100_000], 0).unwrap();
    let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    calls::fallocate(&file, punch, 10_000, 20_000).unwrap();
    calls::fallocate(&file, libc::FALLOC_FL_ZERO_RANGE, 95_000, 10_000).unwrap();
    assert_eq!(errno(calls::fallocate(&file, libc::FALLOC_FL_PUNCH_HOLE, 0, 10)), libc::EOPNOTSUPP);
    drop(file);
    for _ in 0..2 {
        let content = fs::read(&path).unwrap();
        assert_eq!(content.len(), 105_000);
        for (at, byte) in content.iter().enumerate() {
            let zero = (10_000..30_000).contains(&at) || at >= 95_000;
            assert_eq!(*byte, if zero { 0 } else { 9 }, "at {at}");
        }
        place.remount();
    }
}

#[test]
fn an_open_file_outlives_its_name() {
    let place = Place::new();
    let path = place.join("file");
    let mut file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    file.write_all(&[3; 300_000]).unwrap();
    fs::remove_file(&path).unwrap();
    fs::write(&path, b"another").unwrap();
    file.write_all(b"more").unwrap();
    file.seek(SeekFrom::Start(299_999)).unwrap();
    let mut rest = Vec::new();
    file.read_to_end(&mut rest).unwrap();
    assert_eq!(rest, b"\x03more");
    let info = file.metadata().unwrap();
    assert_eq!((info.nlink(), info.len()), (0, 300_004));
    file.set_len(5).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 5);
    assert_eq!(fs::read(&path).unwrap(), b"another");
}

#[test]
fn shared_and_private_maps() {
    let mut place = Place::new();
    let path = place.join("mapped");
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    file.set_len(1 << 20).unwrap();
    let mut shared = Map::new(&file, 1 << 20, libc::MAP_SHARED);
    shared.bytes()[500_000..500_005].copy_from_slice(b"hello");
    // One page cache: a read sees what a store through the map has done, and the other way round.
    let mut seen = [0; 5];
    file.read_exact_at(&mut seen, 500_000).unwrap();
    assert_eq!(&seen, b"hello");
    file.write_all_at(b"world", 700_000).unwrap();
    assert_eq!(&shared.bytes()[700_000..700_005], b"world");
    shared.sync();
    let mut private = Map::new(&file, 1 << 20, libc::MAP_PRIVATE);
    private.bytes()[500_000] = b'j';
    assert_eq!(shared.bytes()[500_000], b'h');
    drop((shared, private, file));
    place.remount();
    let content = fs::read(&path).unwrap();
    assert_eq!((&content[500_000..500_005], &content[700_000..700_005]), (&b"hello"[..], &b"world"[..]));
}

#[test]
fn a_map_that_is_never_synced_arrives_too() {
    let mut place = Place::new();
    let path = place.join("mapped");
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    file.set_len(3 << 20).unwrap();
    let mut map = Map::new(&file, 3 << 20, libc::MAP_SHARED);
    drop(file);
    map.bytes().chunks_mut(4096).enumerate().for_each(|(page, bytes)| bytes.fill(page as u8));
    drop(map);
    place.remount();
    let content = fs::read(&path).unwrap();
    assert!(
        content.chunks(4096).enumerate().all(|(page, bytes)| bytes.iter().all(|byte| *byte == page as u8))
    );
}

#[test]
fn a_linker_writes_its_output_through_a_map_and_it_runs() {
    let mut place = Place::new();
    fs::write(place.join("a.c"), "int twice(int x) { return 2 * x; }\n").unwrap();
    fs::write(place.join("b.c"), "int twice(int); int main(void) { return twice(21); }\n").unwrap();
    run(sh("cc -g -c a.c && cc -g -c b.c && cc -o prog a.o b.o && ar rc lib.a a.o b.o")
        .current_dir(place.path()));
    for _ in 0..2 {
        assert_eq!(Command::new(place.join("prog")).status().unwrap().code(), Some(42));
        place.remount();
    }
}

#[test]
fn times_have_nanoseconds_and_stay() {
    let mut place = Place::new();
    let path = place.join("file");
    fs::write(&path, b"x").unwrap();
    let times = [(1_000_000_000, 123_456_789), (2_000_000_000, 987_654_321)];
    calls::set_times(&path, times).unwrap();
    calls::set_times(place.path(), times).unwrap();
    for _ in 0..2 {
        for path in [&path, place.path()] {
            let info = fs::metadata(path).unwrap();
            assert_eq!((info.atime(), info.atime_nsec()), times[0]);
            assert_eq!((info.mtime(), info.mtime_nsec()), times[1]);
        }
        place.remount();
    }
    // A time before the epoch, and one after 2038.
    for secs in [-1_000_000_000, 5_000_000_000] {
        calls::set_times(&path, [(secs, 1), (secs, 2)]).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mtime(), secs);
    }
}

#[test]
fn writes_move_times_and_reads_do_not() {
    let place = Place::new();
    let path = place.join("file");
    fs::write(&path, b"x").unwrap();
    calls::set_times(&path, [(1000, 0), (1000, 0)]).unwrap();
    let file = File::options().append(true).open(&path).unwrap();
    (&file).write_all(b"y").unwrap();
    let info = fs::metadata(&path).unwrap();
    assert!(info.mtime() > 1000 && info.ctime() > 1000);
    let ctime = (info.ctime(), info.ctime_nsec());
    std::thread::sleep(std::time::Duration::from_millis(30));
    calls::chmod(&path, 0o600);
    let info = fs::metadata(&path).unwrap();
    assert!((info.ctime(), info.ctime_nsec()) > ctime);
}

#[test]
fn large_files_in_random_order() {
    let mut place = Place::new();
    let path = place.join("large");
    let file = File::create(&path).unwrap();
    // 40 MiB in pieces of odd length, from the end to the start.
    let piece = 999_983;
    let pieces = 42;
    for at in (0..pieces).rev() {
        file.write_all_at(&vec![at as u8; piece], (at * piece) as u64).unwrap();
    }
    drop(file);
    place.remount();
    let content = fs::read(&path).unwrap();
    assert_eq!(content.len(), pieces * piece);
    assert!(content.chunks(piece).enumerate().all(|(at, bytes)| bytes.iter().all(|byte| *byte == at as u8)));
}
