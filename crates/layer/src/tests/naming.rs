//! Layers by name, and archives as layers.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

use tempfile::TempDir;

use super::tree::{assert_same, seen, with_everything};
use crate::named::archive::unpack;
use crate::{CreateOptions, LayerError, LayersDir, create, resolve, resolve_all};

fn place() -> (TempDir, LayersDir) {
    let dir = tempfile::Builder::new().prefix("hayloft-layer-").tempdir().unwrap();
    let layers = LayersDir::new(dir.path().join("layers"));
    (dir, layers)
}

fn tar(args: &[&str], folder: &Path, archive: &Path) {
    let mut command = Command::new("tar");
    command.arg("--create").arg("--file").arg(archive).args(args).arg("-C").arg(folder).arg(".");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// What tar(1) does not keep.
fn without_sockets(top: &Path) {
    fs::remove_file(top.join("etc/socket")).unwrap();
    let folder = crate::files::folder::Folder::open(top).unwrap();
    folder.set_mtime("etc".as_ref(), (1_000_000_000, 5)).unwrap();
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(folder)
        .map(|entries| entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect())
        .unwrap_or_default();
    names.sort();
    names
}

#[test]
fn layers_come_from_folders_and_archives() {
    let (dir, layers) = place();
    let (folder, archive) = (dir.path().join("folder"), dir.path().join("a.tar.xz"));
    with_everything(&folder);
    let from = format!("dir:{}", folder.display());
    // It may be a layer itself.
    super::tree::whiteout(&folder.join("gone"));
    super::tree::set_xattr(&folder.join("usr"), "trusted.overlay.opaque", b"y");
    let info = create(&layers, "one", &from, &CreateOptions::default()).unwrap();
    assert_same(&folder, &layers.tree("one").unwrap());
    assert_eq!((info.files, &info.from), (17, &from));
    without_sockets(&folder);
    tar(&["--xz", "--format=posix", "--xattrs", "--xattrs-include=*"], &folder, &archive);
    let from = format!("tar:{}", archive.display());
    create(&layers, "two", &from, &CreateOptions::default()).unwrap();
    assert_same(&folder, &layers.tree("two").unwrap());

    let found: Vec<_> = layers.list().unwrap().into_iter().map(|(name, info)| (name, info.files)).collect();
    assert_eq!(found, [("one".to_owned(), 17), ("two".to_owned(), 16)]);
    let error = create(&layers, "two", &from, &CreateOptions::default()).unwrap_err();
    assert!(matches!(error, LayerError::Exists(_)), "{error}");
    fs::write(folder.join("etc/new"), "x").unwrap();
    let from = format!("dir:{}", folder.display());
    let options = CreateOptions { replace: true, ..Default::default() };
    create(&layers, "two", &from, &options).unwrap();
    assert_same(&folder, &resolve("two", &layers).unwrap());
    layers.remove("one").unwrap();
    assert!(matches!(layers.remove("one"), Err(LayerError::NoLayer { .. })));
    assert_eq!(names(layers.base()), ["two"]);
}

#[test]
fn a_layer_that_cannot_be_made_is_not_there() {
    let (dir, layers) = place();
    for from in ["dir:/nowhere/at/all", "tar:/etc/passwd", "zip:x"] {
        create(&layers, "x", from, &CreateOptions::default()).unwrap_err();
    }
    for name in ["", ".x", "a/b", "-a", ".."] {
        let from = format!("dir:{}", dir.path().display());
        let error = create(&layers, name, &from, &CreateOptions::default()).unwrap_err();
        assert!(matches!(error, LayerError::Name(_)), "{name}: {error}");
    }
    assert!(names(layers.base()).is_empty());
    // What a crash left of another one goes, too.
    fs::create_dir_all(layers.base().join(".y.hayloft-new/new/tree")).unwrap();
    create(&layers, "z", "dir:/etc/apt", &CreateOptions::default()).unwrap();
    assert_eq!(names(layers.base()), ["z"]);
}

#[test]
fn archives_of_every_kind_are_unpacked() {
    let (dir, _) = place();
    let folder = dir.path().join("folder");
    with_everything(&folder);
    without_sockets(&folder);
    let xattrs = ["--format=posix", "--xattrs", "--xattrs-include=*"];
    let (oldest, older) = (["--sparse", "--sparse-version=0.0"], ["--sparse", "--sparse-version=0.1"]);
    let kinds = [&[][..], &["--gzip"], &["--bzip2"], &["--xz"], &["--sparse"], &oldest, &older];
    for (at, more) in kinds.iter().enumerate() {
        let (archive, into) = (dir.path().join(format!("{at}.tar")), dir.path().join(format!("out{at}")));
        tar(&[&xattrs[..], more].concat(), &folder, &archive);
        fs::create_dir(&into).unwrap();
        unpack(&archive, &into, &|_, _| {}).unwrap();
        assert_same(&folder, &into);
        let blocks = std::os::unix::fs::MetadataExt::blocks(&into.join("etc/sparse").metadata().unwrap());
        assert!(blocks * 512 < 200_000, "{at}: {blocks}");
    }
    // zstd, by the library: tar(1) would need the program.
    let (archive, into) = (dir.path().join("z.tar"), dir.path().join("z"));
    let plain = fs::read(dir.path().join("0.tar")).unwrap();
    fs::write(&archive, zstd::encode_all(&plain[..], 1).unwrap()).unwrap();
    fs::create_dir(&into).unwrap();
    unpack(&archive, &into, &|_, _| {}).unwrap();
    assert_same(&folder, &into);
    // The format of GNU tar, with its own kind of sparse files; it knows no attributes and no fractions of seconds.
    let (archive, into) = (dir.path().join("gnu.tar"), dir.path().join("gnu"));
    tar(&["--format=gnu", "--sparse"], &folder, &archive);
    fs::create_dir(&into).unwrap();
    unpack(&archive, &into, &|_, _| {}).unwrap();
    assert_eq!(fs::read(folder.join("etc/sparse")).unwrap(), fs::read(into.join("etc/sparse")).unwrap());
    assert_eq!(seen(&folder).keys().collect::<Vec<_>>(), seen(&into).keys().collect::<Vec<_>>());
    // Damaged at its end.
    let archive = dir.path().join("1.tar");
    let whole = fs::read(&archive).unwrap();
    fs::write(&archive, &whole[..whole.len() - 20]).unwrap();
    let into = dir.path().join("damaged");
    fs::create_dir(&into).unwrap();
    unpack(&archive, &into, &|_, _| {}).unwrap_err();
}

#[test]
fn a_file_with_holes_in_an_unknown_form_is_refused() {
    let (dir, _) = place();
    for (at, keys) in [
        &[("GNU.sparse.major", "2"), ("GNU.sparse.minor", "0"), ("GNU.sparse.realsize", "9")][..],
        &[("GNU.sparse.newer", "x"), ("GNU.sparse.size", "9")],
        &[("GNU.sparse.size", "9"), ("GNU.sparse.numblocks", "2"), ("GNU.sparse.map", "0,1")],
        &[("GNU.sparse.size", "9"), ("GNU.sparse.numblocks", "1"), ("GNU.sparse.map", "0,8")],
        &[("GNU.sparse.map", "0,x")],
    ]
    .iter()
    .enumerate()
    {
        let (archive, into) = (dir.path().join(format!("{at}.tar")), dir.path().join(format!("out{at}")));
        fs::create_dir(&into).unwrap();
        let mut builder = tar::Builder::new(fs::File::create(&archive).unwrap());
        builder.append_pax_extensions(keys.iter().map(|(key, value)| (*key, value.as_bytes()))).unwrap();
        let mut header = tar::Header::new_ustar();
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        header.set_size(4);
        header.set_cksum();
        builder.append_data(&mut header, "file", &b"text"[..]).unwrap();
        builder.into_inner().unwrap().flush().unwrap();
        let error = unpack(&archive, &into, &|_, _| {}).unwrap_err().to_string();
        assert!(error.contains("holes"), "{at}: {error}");
    }
}

#[test]
fn a_folder_behind_a_link_has_its_attributes() {
    use std::os::unix::fs::{MetadataExt, symlink};
    let (dir, _) = place();
    let (folder, archive, into) =
        (dir.path().join("folder"), dir.path().join("a.tar"), dir.path().join("into"));
    fs::create_dir_all(folder.join("one/usr/lib")).unwrap();
    symlink("/usr/lib", folder.join("one/lib")).unwrap();
    fs::create_dir_all(folder.join("two/lib/foo/deep")).unwrap();
    std::os::unix::fs::chown(folder.join("two/lib/foo"), Some(1234), Some(5)).unwrap();
    run("chmod 2775 \"$0\"", &folder.join("two/lib/foo"));
    run("tar -cf a.tar -C folder/one usr lib; tar -rf a.tar -C folder/two lib/foo", dir.path());
    fs::create_dir(&into).unwrap();
    unpack(&archive, &into, &|_, _| {}).unwrap();
    let meta = into.join("usr/lib/foo").symlink_metadata().unwrap();
    assert_eq!((meta.mode() & 0o7777, meta.uid(), meta.gid()), (0o2775, 1234, 5));
    assert_eq!(names(&into.join("usr/lib/foo")), ["deep"]);
}

/// A shell script in a folder, which is its `$0`.
fn run(script: &str, folder: &Path) {
    let status = Command::new("sh").args(["-euc", script]).arg(folder).current_dir(folder).status().unwrap();
    assert!(status.success(), "{script}");
}

/// An archive with these entries: a path and a link's target, or a file's content.
fn crafted(path: &Path, entries: &[(&str, tar::EntryType, &str)]) {
    let mut builder = tar::Builder::new(fs::File::create(path).unwrap());
    for (name, kind, text) in entries {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(*kind);
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        // As an evil one writes it: `set_path` would refuse.
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        let content = if kind.is_file() { text.as_bytes() } else { b"" };
        if !kind.is_file() {
            header.as_old_mut().linkname[..text.len()].copy_from_slice(text.as_bytes());
        }
        header.set_size(content.len() as u64);
        header.set_cksum();
        builder.append(&header, content).unwrap();
    }
    builder.into_inner().unwrap().flush().unwrap();
}

#[test]
fn no_archive_writes_outside_its_tree() {
    use tar::EntryType::{Link, Regular, Symlink};
    let (dir, _) = place();
    let (archive, into, outside) =
        (dir.path().join("evil.tar"), dir.path().join("into"), dir.path().join("outside"));
    fs::create_dir(&into).unwrap();
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("secret"), "secret").unwrap();
    let to_outside = outside.to_str().unwrap();
    crafted(
        &archive,
        &[
            ("../outside/a", Regular, "a"),
            ("/outside/b", Regular, "b"),
            ("link", Symlink, to_outside),
            ("up", Symlink, "../outside"),
        ],
    );
    unpack(&archive, &into, &|_, _| {}).unwrap();
    // Links are followed as if the tree was all there is.
    for (entry, kind, text) in [
        ("link/c", Regular, "c"),
        ("up/d", Regular, "d"),
        ("stolen", Link, "link/secret"),
        ("stolen", Link, "../outside/secret"),
    ] {
        let more = dir.path().join("more.tar");
        crafted(&more, &[(entry, kind, text)]);
        let _ = unpack(&more, &into, &|_, _| {});
    }
    assert_eq!(names(&outside), ["secret"]);
    assert_eq!(fs::read_to_string(into.join("outside/a")).unwrap(), "a");
    assert_eq!(fs::read_to_string(into.join("outside/b")).unwrap(), "b");
    assert!(!into.join("stolen").exists());
}

/// Archives that somebody has changed here and there are unpacked, or refused, and nothing is written elsewhere.
#[test]
fn whatever_an_archive_says_it_writes_into_its_tree() {
    use proptest::prelude::*;
    use proptest::sample::Index;
    use proptest::test_runner::{FileFailurePersistence, TestRunner};

    let (dir, _) = place();
    let (good, bad, outside) =
        (dir.path().join("good.tar"), dir.path().join("bad.tar"), dir.path().join("outside"));
    let from = dir.path().join("from");
    fs::create_dir_all(from.join("folder")).unwrap();
    fs::create_dir(&outside).unwrap();
    fs::write(from.join("folder/file"), "hay".repeat(400)).unwrap();
    std::os::unix::fs::symlink("../outside", from.join("link")).unwrap();
    fs::hard_link(from.join("folder/file"), from.join("twin")).unwrap();
    tar(&["--format=posix"], &from, &good);
    let good = fs::read(&good).unwrap();
    let config = ProptestConfig {
        cases: 300,
        source_file: Some(file!()),
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("corpus"))),
        ..ProptestConfig::default()
    };
    let bytes = prop_oneof![
        Just(b"..".to_vec()),
        Just(b"/".to_vec()),
        Just(b"7777777".to_vec()),
        prop::collection::vec(any::<u8>(), 1..5)
    ];
    let edits = prop::collection::vec((any::<Index>(), bytes), 1..6);
    let said = (edits, any::<bool>(), any::<Index>());
    TestRunner::new(config)
        .run(&said, |(edits, right, cut)| {
            let mut tar = good.clone();
            for (at, bytes) in edits {
                let at = at.index(tar.len() - 8);
                tar[at..at + bytes.len()].copy_from_slice(&bytes);
            }
            if right {
                right_checksums(&mut tar);
            } else if cut.index(4) == 0 {
                tar.truncate(cut.index(tar.len()));
            }
            fs::write(&bad, &tar).unwrap();
            let into = tempfile::tempdir_in(dir.path()).unwrap();
            let _ = unpack(&bad, into.path(), &|_, _| {});
            prop_assert!(names(&outside).is_empty());
            Ok(())
        })
        .unwrap();
}

/// Gives every block that may be a header its checksum.
fn right_checksums(tar: &mut [u8]) {
    for header in tar.chunks_exact_mut(512).filter(|block| &block[257..262] == b"ustar") {
        header[148..156].fill(b' ');
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    }
}

/// Waits until something that is tried again and again is so: programs that other tests are starting just now have
/// copies of every lock of this process until they run.
fn until(mut is_so: impl FnMut() -> bool) {
    for _ in 0..1000 {
        if is_so() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("not within ten seconds");
}

#[test]
fn layers_are_for_their_user_alone() {
    use std::os::unix::fs::PermissionsExt;
    let (dir, layers) = place();
    let (folder, archive) = (dir.path().join("folder"), dir.path().join("a.tar"));
    fs::create_dir(&folder).unwrap();
    create(&layers, "x", &format!("dir:{}", folder.display()), &CreateOptions::default()).unwrap();
    tar(&[], &folder, &archive);
    let unpacked = resolve(archive.to_str().unwrap(), &layers).unwrap();
    for tree in [layers.tree("x").unwrap(), unpacked] {
        let above = fs::metadata(tree.parent().unwrap()).unwrap();
        assert_eq!(above.permissions().mode() & 0o777, 0o700, "{}", tree.display());
    }
}

#[test]
fn a_layer_stays_as_long_as_it_is_used() {
    let (dir, layers) = place();
    let folder = dir.path().join("folder");
    fs::create_dir(&folder).unwrap();
    let from = format!("dir:{}", folder.display());
    let make = |text: &str| {
        fs::write(folder.join("file"), text).unwrap();
        let options = CreateOptions { replace: true, ..Default::default() };
        create(&layers, "x", &from, &options).unwrap();
    };
    let entries = || fs::read_dir(layers.base()).unwrap().count();
    make("one");
    let used = resolve_all("x", &layers, &|_, _| {}).unwrap().remove(0);
    // What an overlay has: the folder, not its path.
    let inside = crate::files::folder::Folder::open(&used.path).unwrap();
    let read = || std::io::read_to_string(inside.open_file("file".as_ref()).unwrap()).unwrap();
    assert!(matches!(layers.remove("x"), Err(LayerError::InUse(_))));
    make("two");
    make("three");
    assert_eq!((read().as_str(), entries()), ("one", 2));
    assert_eq!(fs::read_to_string(resolve("x", &layers).unwrap().join("file")).unwrap(), "three");
    assert_eq!(layers.list().unwrap().len(), 1);
    drop(used);
    until(|| {
        make("four");
        entries() == 1
    });
    until(|| layers.remove("x").is_ok());
    assert_eq!(entries(), 0);
}

#[test]
fn an_unpacked_archive_stays_as_long_as_it_is_used() {
    let (dir, layers) = place();
    let folder = dir.path().join("folder");
    fs::create_dir(&folder).unwrap();
    let archive = dir.path().join("a.tar");
    let unpack = |text: &str| {
        fs::write(folder.join("file"), text).unwrap();
        tar(&[], &folder, &archive);
        resolve_all(archive.to_str().unwrap(), &layers, &|_, _| {}).unwrap().remove(0)
    };
    let one = unpack("first");
    let old = std::time::SystemTime::now() - std::time::Duration::from_secs(90 * 24 * 3600);
    let outdate = |tree: &Path| {
        let used = fs::File::options().write(true).open(tree.with_file_name("used")).unwrap();
        used.set_modified(old).unwrap();
    };
    outdate(&one.path);
    let two = unpack("second, longer");
    assert_ne!(one.path, two.path);
    assert_eq!(fs::read_to_string(one.path.join("file")).unwrap(), "first");
    let path = one.path.clone();
    drop(one);
    let mut text = String::from("third, still longer");
    until(|| {
        text.push('.');
        let three = unpack(&text);
        !path.exists() && two.path.exists() && three.path.exists()
    });
}

#[test]
fn an_archive_is_unpacked_once() {
    let (dir, layers) = place();
    let (folder, archive) = (dir.path().join("folder"), dir.path().join("a.tgz"));
    with_everything(&folder);
    without_sockets(&folder);
    tar(&["--gzip", "--format=posix", "--xattrs", "--xattrs-include=*"], &folder, &archive);
    let spec = archive.to_str().unwrap();
    let unpacked = AtomicU64::new(0);
    let trees: Vec<PathBuf> = std::thread::scope(|scope| {
        let all: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    resolve_all(spec, &layers, &|done, _| {
                        // Once in the beginning of each archive.
                        if done > 0 {
                            unpacked.fetch_add(1, Ordering::Relaxed);
                        }
                    })
                    .unwrap()
                    .remove(0)
                    .path
                })
            })
            .collect();
        all.into_iter().map(|one| one.join().unwrap()).collect()
    });
    assert!(trees.iter().all(|tree| tree == &trees[0]));
    assert_eq!(unpacked.load(Ordering::Relaxed), 1);
    assert_same(&folder, &trees[0]);
    assert_eq!(resolve(spec, &layers).unwrap(), trees[0]);
    // A new version is another one.
    fs::write(folder.join("etc/more"), "x").unwrap();
    tar(&["--gzip", "--format=posix", "--xattrs", "--xattrs-include=*"], &folder, &archive);
    let newer = resolve(spec, &layers).unwrap();
    assert_ne!(newer, trees[0]);
    assert_same(&folder, &newer);
    // The cache is no layer.
    assert!(layers.list().unwrap().is_empty());
}

#[test]
fn names_paths_and_images_are_told_apart() {
    let (dir, layers) = place();
    assert_eq!(resolve(dir.path().to_str().unwrap(), &layers).unwrap(), dir.path().canonicalize().unwrap());
    let error = resolve("none", &layers).unwrap_err();
    assert!(matches!(error, LayerError::NoLayer { .. }), "{error}");
    let image = dir.path().join("image");
    let mut content = vec![0; 2048];
    content[..4].copy_from_slice(b"hsqs");
    fs::write(&image, &content).unwrap();
    assert_eq!(resolve(image.to_str().unwrap(), &layers).unwrap(), image.canonicalize().unwrap());
    content[..4].copy_from_slice(b"none");
    fs::write(&image, &content).unwrap();
    let error = resolve(image.to_str().unwrap(), &layers).unwrap_err();
    assert!(matches!(error, LayerError::NotALayer { .. }), "{error}");
    resolve("/nowhere/at/all", &layers).unwrap_err();
}
