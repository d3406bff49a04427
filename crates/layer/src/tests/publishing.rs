//! Publishing on plain folders.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use tempfile::TempDir;

use super::tree::{assert_same, seen, set_xattr, whiteout, with_everything};
use super::{publish, target};
use crate::files::folder::Folder;
use crate::overlay::changes::{Change, ChangeKind, changes};
use crate::publication::staging::Staging;
use crate::{Form, LayerError, Marks, PublishOptions, Published, Stack, Target};

pub(super) fn stage(
    stack: &Stack,
    path: &Path,
    options: &PublishOptions<'_>,
) -> crate::Result<(Staging, Published)> {
    crate::publication::publish::stage(stack, target(path)?, options)
}

pub(super) struct World {
    dir: TempDir,
}

impl World {
    /// A layer, an upper folder and a target, all empty.
    pub(super) fn new() -> World {
        let dir = tempfile::Builder::new().prefix("hayloft-layer-").tempdir().unwrap();
        for name in ["layer", "upper", "volume"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        World { dir }
    }

    pub(super) fn at(&self, path: &str) -> PathBuf {
        self.dir.path().join(path)
    }

    pub(super) fn write(&self, path: &str, content: &str) {
        let path = self.at(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    pub(super) fn stack(&self) -> Stack {
        Stack::open(&self.at("upper"), &[self.at("layer")], Marks::Trusted).unwrap()
    }

    pub(super) fn told(&self) -> Vec<String> {
        let tell = |change: crate::Result<Change>| {
            let change = change.unwrap();
            let aspects: Vec<_> = change.aspects.names().collect();
            format!("{change} {}", aspects.join(",")).trim_end().to_owned()
        };
        changes(&self.stack()).map(tell).filter(|line| !line.ends_with(" time")).collect()
    }

    pub(super) fn publish(&self) -> crate::Published {
        publish(&self.stack(), &self.at("volume/out"), &PublishOptions::default()).unwrap()
    }

    /// What is in a folder, dotted names included.
    pub(super) fn names(&self, path: &str) -> Vec<String> {
        let entries = fs::read_dir(self.at(path)).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

/// Makes `copy` what `original` is, as overlayfs copies a file up.
fn copy_up(original: &Path, copy: &Path) {
    fs::create_dir_all(copy.parent().unwrap()).unwrap();
    fs::copy(original, copy).unwrap();
    let meta = original.metadata().unwrap();
    chown(copy, Some(meta.uid()), Some(meta.gid())).unwrap();
    let file = fs::File::options().write(true).open(copy).unwrap();
    file.set_modified(meta.modified().unwrap()).unwrap();
}

#[test]
fn changes_are_told_by_kind() {
    let world = World::new();
    for (name, content) in [("same", "1"), ("content", "2"), ("mode", "3"), ("owner", "4"), ("gone", "5")] {
        world.write(&format!("layer/{name}"), content);
    }
    world.write("layer/type/inside", "6");
    world.write("layer/replaced/old", "7");
    world.write("layer/cap", "8");
    for name in ["same", "content", "mode", "owner", "cap"] {
        copy_up(&world.at("layer").join(name), &world.at("upper").join(name));
    }
    world.write("upper/content", "new");
    fs::set_permissions(world.at("upper/mode"), fs::Permissions::from_mode(0o4755)).unwrap();
    chown(world.at("upper/owner"), Some(1000), None).unwrap();
    set_xattr(&world.at("upper/cap"), "user.note", b"x");
    whiteout(&world.at("upper/gone"));
    world.write("upper/type", "a file");
    world.write("upper/replaced/new", "9");
    set_xattr(&world.at("upper/replaced"), "trusted.overlay.opaque", b"y");
    world.write("upper/new/file", "10");
    // A removal of nothing.
    whiteout(&world.at("upper/never"));
    assert_eq!(
        world.told(),
        [
            "changed  /cap xattrs",
            "changed  /content content,time",
            "removed  /gone",
            "changed  /mode mode",
            "added    /new",
            "changed  /owner owner",
            "type     /type",
            "added    /new/file",
            "added    /replaced/new",
            "removed  /replaced/old",
        ]
    );
    assert_eq!(changes(&world.stack()).map(Result::unwrap).filter(|c| c.kind == ChangeKind::Type).count(), 1);
}

#[test]
fn whiteouts_by_attribute_are_understood() {
    let world = World::new();
    world.write("layer/d/gone", "1");
    world.write("layer/d/stays", "2");
    world.write("upper/d/gone", "");
    // Without the folder's word for it, it is an empty file.
    set_xattr(&world.at("upper/d/gone"), "trusted.overlay.whiteout", b"");
    assert_eq!(world.told(), ["changed  /d/gone content,time"]);
    set_xattr(&world.at("upper/d"), "trusted.overlay.opaque", b"x");
    assert_eq!(world.told(), ["removed  /d/gone"]);
    rustix::fs::lremovexattr(world.at("upper/d"), "trusted.overlay.opaque").unwrap();
    set_xattr(&world.at("upper/d"), "trusted.overlay.whiteouts", b"y");
    assert_eq!(world.told(), ["removed  /d/gone"]);
}

#[test]
fn everything_survives_publishing() {
    let world = World::new();
    with_everything(&world.at("upper"));
    let published = world.publish();
    assert_same(&world.at("upper"), &world.at("volume/out"));
    assert!(!published.lost.any());
    // Holes are no bytes.
    assert!(published.bytes < 200_000, "{published:?}");
    assert!(world.at("volume/out/etc/sparse").metadata().unwrap().blocks() * 512 < 200_000);
    assert_eq!(world.names("volume"), ["out"]);
    let before = seen(&world.at("volume/out"));
    world.publish();
    assert_eq!(seen(&world.at("volume/out")), before);
}

#[test]
fn what_is_not_touched_stays() {
    let world = World::new();
    with_everything(&world.at("volume/out"));
    world.write("layer/etc/old", "layer");
    whiteout_in(&world, "upper/etc", "one");
    // The layer has no such file, so its removal is none.
    world.write("upper/etc/new", "new");
    let inode = |path: &str| world.at(path).symlink_metadata().unwrap().ino();
    let (before, old_inode) = (seen(&world.at("volume/out")), inode("volume/out/usr/bin/ping"));
    world.publish();
    let mut after = seen(&world.at("volume/out"));
    assert!(after.remove(Path::new("etc/new")).is_some());
    let differing: Vec<_> = before.keys().filter(|path| before.get(*path) != after.get(*path)).collect();
    // The times of the folders that got a name, or whose own time is new.
    assert!(differing.iter().all(|path| [Path::new(""), Path::new("etc")].contains(&path.as_path())));
    assert_eq!(old_inode, inode("volume/out/usr/bin/ping"));
    assert_eq!(world.at("volume/out/etc/two").metadata().unwrap().nlink(), 3);
}

fn whiteout_in(world: &World, folder: &str, name: &str) {
    fs::create_dir_all(world.at(folder)).unwrap();
    whiteout(&world.at(folder).join(name));
}

#[test]
fn files_are_replaced_and_never_written_in_place() {
    let world = World::new();
    world.write("layer/a", "1");
    world.write("volume/out/a", "1");
    fs::hard_link(world.at("volume/out/a"), world.at("volume/out/b")).unwrap();
    let held = fs::File::open(world.at("volume/out/a")).unwrap();
    world.write("upper/a", "2");
    world.publish();
    assert_eq!(fs::read_to_string(world.at("volume/out/a")).unwrap(), "2");
    assert_eq!(fs::read_to_string(world.at("volume/out/b")).unwrap(), "1");
    assert_eq!(io::read_to_string(held).unwrap(), "1");
}

#[test]
fn only_chosen_paths_are_published() {
    let world = World::new();
    world.write("upper/build/out/a.deb", "1");
    world.write("upper/build/out/b.deb", "2");
    world.write("upper/build/tmp/x", "3");
    world.write("upper/etc/passwd", "4");
    fs::set_permissions(world.at("upper/build"), fs::Permissions::from_mode(0o750)).unwrap();
    let only = [PathBuf::from("/build/out"), "etc/passwd".into()];
    let options = PublishOptions { only: &only, ..Default::default() };
    publish(&world.stack(), &world.at("volume/out"), &options).unwrap();
    let paths: Vec<_> = seen(&world.at("volume/out")).into_keys().collect();
    let expected = ["", "build", "build/out", "build/out/a.deb", "build/out/b.deb", "etc", "etc/passwd"];
    assert_eq!(paths, expected.map(PathBuf::from));
    assert_eq!(world.at("volume/out/build").metadata().unwrap().mode() & 0o7777, 0o750);

    // One in another.
    let only = ["/build", "/build/out/a.deb", "/"].map(PathBuf::from);
    let options = PublishOptions { only: &only, ..Default::default() };
    publish(&world.stack(), &world.at("volume/out"), &options).unwrap();

    let only = [PathBuf::from("/build/none")];
    let options = PublishOptions { only: &only, ..Default::default() };
    let error = publish(&world.stack(), &world.at("volume/other"), &options).unwrap_err();
    assert!(matches!(&error, LayerError::NotChanged(path) if path == Path::new("/build/none")), "{error}");
    assert_eq!(world.names("volume"), ["out"]);
}

#[test]
fn readers_see_all_or_nothing() {
    let world = World::new();
    for at in 0..40 {
        world.write(&format!("upper/d{}/f{at}", at % 5), "1");
    }
    world.publish();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    let mut looks = 0;
                    while !done.load(Ordering::Relaxed) {
                        // Each look takes the folder once, and goes on from there.
                        let Ok(folder) = Folder::open(&world.at("volume/out")) else {
                            panic!("the target was not there");
                        };
                        let first = folder.sub(Path::new("d0")).and_then(|d| d.open_file("f0".as_ref()));
                        let last = folder.sub(Path::new("d4")).and_then(|d| d.open_file("f39".as_ref()));
                        let (Ok(first), Ok(last)) = (first, last) else { continue };
                        let both = [io::read_to_string(first).unwrap(), io::read_to_string(last).unwrap()];
                        assert_eq!(both[0], both[1]);
                        looks += 1;
                    }
                    looks
                })
            })
            .collect();
        let nothing = |_: &Path| Ok(());
        for round in 2..30 {
            for at in 0..40 {
                world.write(&format!("upper/d{}/f{at}", at % 5), &round.to_string());
            }
            let options = PublishOptions { durable: Some(&nothing), ..Default::default() };
            publish(&world.stack(), &world.at("volume/out"), &options).unwrap();
        }
        done.store(true, Ordering::Relaxed);
        assert!(readers.into_iter().map(|reader| reader.join().unwrap()).sum::<u64>() > 0);
    });
}

#[test]
fn a_link_in_the_root_leads_nowhere() {
    let world = World::new();
    world.write("secret/key", "secret");
    world.write("layer/d/key", "1");
    world.write("upper/d/key", "2");
    let stack = world.stack();
    // The task swaps a folder for a link while its changes are being read.
    let folder = stack.top(0).unwrap().unwrap();
    let inside = stack.lookup(&folder, "d".as_ref()).unwrap().unwrap();
    fs::rename(world.at("upper/d"), world.at("upper/e")).unwrap();
    std::os::unix::fs::symlink(world.at("secret"), world.at("upper/d")).unwrap();
    stack.lookup(&inside, "key".as_ref()).unwrap_err();
    // In the target it is replaced, not followed.
    std::os::unix::fs::symlink(world.at("secret"), world.at("link")).unwrap();
    fs::create_dir(world.at("volume/out")).unwrap();
    fs::rename(world.at("link"), world.at("volume/out/e")).unwrap();
    world.publish();
    assert_eq!(fs::read_to_string(world.at("secret/key")).unwrap(), "secret");
    assert_eq!(fs::read_to_string(world.at("volume/out/e/key")).unwrap(), "2");
    assert!(world.at("volume/out/d").is_symlink());
}

#[test]
fn as_a_layer_removals_are_whiteouts() {
    let world = World::new();
    world.write("layer/gone", "1");
    world.write("layer/d/old", "2");
    world.write("layer/same", "3");
    whiteout(&world.at("upper/gone"));
    world.write("upper/d/new", "4");
    set_xattr(&world.at("upper/d"), "trusted.overlay.opaque", b"y");
    copy_up(&world.at("layer/same"), &world.at("upper/same"));
    world.write("volume/out/before", "it is replaced as a whole");
    let options = PublishOptions { form: Form::Layer, ..Default::default() };
    let published = publish(&world.stack(), &world.at("volume/out"), &options).unwrap();
    assert_eq!(published.removed, 1);
    assert_eq!(world.names("volume/out"), ["d", "gone"]);
    assert_eq!(world.at("volume/out/gone").metadata().unwrap().rdev(), 0);
    let mut value = [0; 4];
    let length =
        rustix::fs::lgetxattr(world.at("volume/out/d"), "trusted.overlay.opaque", &mut value[..]).unwrap();
    assert_eq!(&value[..length], b"y");
}

/// A folder that is mounted on another one, until this is dropped.
struct Bind(PathBuf);

impl Bind {
    fn new(from: &Path, to: &Path) -> Bind {
        rustix::mount::mount_bind(from, to).unwrap();
        Bind(to.to_owned())
    }
}

impl Drop for Bind {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

#[test]
fn what_is_mounted_in_the_target_is_not_touched() {
    let world = World::new();
    world.write("upper/a", "1");
    world.write("volume/out/da ta/x", "0");
    world.write("precious/d/file", "important");
    let before = seen(&world.at("volume/out"));
    let bind = Bind::new(&world.at("precious"), &world.at("volume/out/da ta"));
    for form in [Form::Merged, Form::Layer] {
        let options = PublishOptions { form, ..Default::default() };
        let error = publish(&world.stack(), &world.at("volume/out"), &options).unwrap_err().to_string();
        assert!(
            error.contains("a file system is mounted on") && error.contains("out/da ta in it"),
            "{error}"
        );
    }
    drop(bind);
    // One that comes later, before the exchange and after it.
    let options = PublishOptions::default();
    let (mut staging, _) = stage(&world.stack(), &world.at("volume/out"), &options).unwrap();
    let bind = Bind::new(&world.at("precious"), &world.at("volume/out/da ta"));
    staging.commit().unwrap_err();
    drop(bind);
    assert_eq!(seen(&world.at("volume/out")), before);
    staging.commit().unwrap();
    let bind = Bind::new(&world.at("precious"), &staging.path().join("da ta"));
    staging.finish().unwrap_err();
    assert_eq!(fs::read_to_string(world.at("precious/d/file")).unwrap(), "important");
    drop(bind);
    world.publish();
    assert_eq!(
        (world.names("volume"), world.names("volume/out")),
        (vec!["out".into()], vec!["a".into(), "da ta".into()])
    );
    // A file, and the target itself.
    world.write("precious/f", "important");
    let bind = Bind::new(&world.at("precious/f"), &world.at("volume/out/a"));
    publish(&world.stack(), &world.at("volume/out"), &options).unwrap_err();
    drop(bind);
    let _bind = Bind::new(&world.at("precious"), &world.at("volume/out"));
    let error = publish(&world.stack(), &world.at("volume/out"), &options).unwrap_err().to_string();
    assert!(error.contains("it is a mount point"), "{error}");
    assert_eq!(world.names("precious"), ["d", "f"]);
}

#[test]
fn a_tree_is_removed_however_deep_it_is() {
    // More levels than descriptors, and a longer path than any call takes.
    let limits = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let few = rustix::process::Rlimit { current: Some(1024), ..limits };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, few).unwrap();
    let world = World::new();
    let mut at = Folder::open(&world.at("volume")).unwrap();
    for _ in 0..3000 {
        rustix::fs::mkdirat(&at, "d", rustix::fs::Mode::RWXU).unwrap();
        rustix::fs::mknodat(&at, "f", rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0).unwrap();
        at = at.sub(Path::new("d")).unwrap();
    }
    Folder::open(&world.at("volume")).unwrap().remove("d".as_ref()).unwrap();
    assert_eq!(world.names("volume"), ["f"]);
}

#[test]
fn no_link_leads_out_of_the_volume() {
    let world = World::new();
    world.write("upper/a", "1");
    world.write("elsewhere/out/b", "2");
    world.write("volume/file", "3");
    fs::create_dir(world.at("volume/x")).unwrap();
    std::os::unix::fs::symlink(world.at("elsewhere"), world.at("volume/x/7")).unwrap();
    std::os::unix::fs::symlink(world.at("volume"), world.at("link")).unwrap();
    let open = |volume: &str, path: &str| Target::open(&world.at(volume), Path::new(path));
    for (path, expected) in [("x/7/out", "x/7: it is a symbolic link"), ("file/out", "file: it is no folder")]
    {
        let error = open("volume", path).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let error = publish(&world.stack(), &world.at("volume/x/7"), &PublishOptions::default()).unwrap_err();
    assert!(error.to_string().contains("it is no folder"), "{error}");
    assert_eq!(
        (world.names("elsewhere"), world.names("elsewhere/out")),
        (vec!["out".into()], vec!["b".into()])
    );
    // The volume's own path may have one.
    crate::publish(&world.stack(), open("link", "x/8").unwrap(), &PublishOptions::default()).unwrap();
    assert_eq!(
        (world.names("volume/x"), world.names("volume")),
        (vec!["7".into(), "8".into()], vec!["file".into(), "x".into()])
    );
}
