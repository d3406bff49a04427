//! What a real overlay mount shows must be what publishing its upper folder gives.

use std::collections::{HashMap, HashSet};
use std::ffi::CString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use tempfile::TempDir;

use super::publish;
use super::tree::{Op, SeenTree, apply, assert_same, assert_same_as, op, seen};
use crate::overlay::changes::{ChangeKind, changes};
use crate::{Form, Marks, PublishOptions, Stack};

/// An overlay mount, gone when dropped.
struct Overlay(PathBuf);

impl Overlay {
    /// Layers topmost first.
    fn mount(at: &Path, upper: Option<(&Path, &Path)>, layers: &[&Path], options: &str) -> Overlay {
        fs::create_dir_all(at).unwrap();
        let mut data = b"lowerdir=".to_vec();
        let layers: Vec<&[u8]> = layers.iter().map(|layer| layer.as_os_str().as_bytes()).collect();
        data.extend(layers.join(&b':'));
        if let Some((upper, work)) = upper {
            fs::create_dir_all(upper).unwrap();
            fs::create_dir_all(work).unwrap();
            data.extend(format!(",upperdir={},workdir={}", upper.display(), work.display()).bytes());
        }
        data.extend(options.bytes());
        mount("overlay", at, "overlay", MountFlags::empty(), Some(CString::new(data).unwrap().as_c_str()))
            .unwrap();
        Overlay(at.to_owned())
    }
}

impl Drop for Overlay {
    fn drop(&mut self) {
        let _ = unmount(&self.0, UnmountFlags::DETACH);
    }
}

struct Place {
    dir: TempDir,
}

impl Place {
    fn new() -> Place {
        Place { dir: tempfile::Builder::new().prefix("hayloft-layer-").tempdir().unwrap() }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

fn publish_as(stack: &Stack, target: &Path, form: Form) {
    let nothing = |_: &Path| Ok(());
    publish(stack, target, &PublishOptions { form, durable: Some(&nothing), ..Default::default() }).unwrap();
}

/// What publishing makes of `before`: an overlay parts a name that it copies up from the file's other names; when
/// nothing else is done to it, it stays one file with them.
fn still_linked(before: &SeenTree, after: &SeenTree, stack: &Stack) -> SeenTree {
    let told: HashSet<PathBuf> = changes(stack).map(|change| change.unwrap().path).collect();
    let mut first_names = HashMap::new();
    let mut tree = after.clone();
    for (path, shown) in &mut tree {
        let is_told = told.contains(path);
        if !is_told {
            let was = &before[path];
            shown.first_name.clone_from(&was.first_name);
            assert_eq!(shown, was, "{}", path.display());
        }
        let file = (is_told, shown.first_name.clone());
        shown.first_name = first_names.entry(file).or_insert_with(|| path.clone()).clone();
    }
    tree
}

/// Three storeys: a folder, an overlay's upper folder above it, and another above that.
fn reproduces(lower_ops: &[Op], middle_ops: &[Op], upper_ops: &[Op], options: &str, marks: Marks) {
    let place = Place::new();
    let (lower, middle, upper) = (place.at("lower"), place.at("middle"), place.at("upper"));
    fs::create_dir(&lower).unwrap();
    apply(&lower, lower_ops);
    let view = place.at("view");
    let overlay = Overlay::mount(&view, Some((&middle, &place.at("work1"))), &[&lower], options);
    apply(&view, middle_ops);
    let after_middle = seen(&view);
    drop(overlay);
    let overlay = Overlay::mount(&view, Some((&upper, &place.at("work2"))), &[&middle, &lower], options);
    apply(&view, upper_ops);
    let after_upper = seen(&view);
    drop(overlay);

    let target = place.at("target");
    publish_as(&Stack::open(&lower, &[], marks).unwrap(), &target, Form::Merged);
    assert_same(&lower, &target);
    let two = Stack::open(&middle, std::slice::from_ref(&lower), marks).unwrap();
    let with_middle = still_linked(&seen(&lower), &after_middle, &two);
    publish_as(&two, &target, Form::Merged);
    assert_same_as(&with_middle, &target);
    let three = Stack::open(&upper, &[middle.clone(), lower.clone()], marks).unwrap();
    let with_upper = still_linked(&with_middle, &after_upper, &three);
    publish_as(&three, &target, Form::Merged);
    assert_same_as(&with_upper, &target);

    // As layers, mounted again without the options.
    let plain = if marks == Marks::User { ",userxattr" } else { "" };
    let (layer_two, layer_three) = (place.at("layer2"), place.at("layer3"));
    publish_as(&two, &layer_two, Form::Layer);
    publish_as(&three, &layer_three, Form::Layer);
    let overlay = Overlay::mount(&view, None, &[&layer_two, &lower], plain);
    assert_same_as(&with_middle, &view);
    drop(overlay);
    let overlay = Overlay::mount(&view, None, &[&layer_three, &layer_two, &lower], plain);
    assert_same_as(&with_upper, &view);
    drop(overlay);

    // Nothing is told that is as it was, and everything else is.
    let told: Vec<_> = changes(&three).map(Result::unwrap).collect();
    for change in &told {
        let (before, now) = (after_middle.get(&change.path), after_upper.get(&change.path));
        match change.kind {
            ChangeKind::Added => assert!(before.is_none() && now.is_some(), "{change}"),
            ChangeKind::Removed => assert!(before.is_some() && now.is_none(), "{change}"),
            _ => assert!(before.is_some() && now.is_some(), "{change}"),
        }
        let only_links = change.kind == ChangeKind::Changed && change.aspects.names().eq(["links"]);
        assert!(before != now || only_links, "{change}: {before:?}");
    }
}

const OPTIONS: [&str; 3] = ["", ",redirect_dir=on", ",redirect_dir=on,metacopy=on"];

fn seed() -> u64 {
    std::env::var("HAYLOFT_TEST_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1)
}

proptest! {
    // The same cases in each run; HAYLOFT_TEST_SEED makes others.
    #![proptest_config(ProptestConfig { cases: 128, rng_seed: RngSeed::Fixed(seed()), ..ProptestConfig::default() })]

    #[test]
    fn publishing_reproduces_what_an_overlay_shows(
        lower in prop::collection::vec(op(), 0..40),
        middle in prop::collection::vec(op(), 0..20),
        upper in prop::collection::vec(op(), 0..20),
        options in prop::sample::select(OPTIONS.to_vec()),
    ) {
        reproduces(&lower, &middle, &upper, options, Marks::Trusted);
    }
}

#[test]
fn marks_of_a_users_overlay_are_understood() {
    let lower = [
        Op::Mkdir("d/e".into()),
        Op::Write("d/e/f".into(), 1),
        Op::Write("d/g".into(), 2),
        Op::Write("h".into(), 3),
    ];
    let middle = [Op::ReplaceFolder("d".into()), Op::Write("d/new".into(), 4), Op::Unlink("h".into())];
    let upper =
        [Op::ReplaceFolder("d".into()), Op::Write("d/g".into(), 4), Op::Rename("d/g".into(), "h".into())];
    reproduces(&lower, &middle, &upper, ",userxattr", Marks::User);
}

#[test]
fn a_moved_folder_keeps_what_is_in_its_layers() {
    let lower = [
        Op::Mkdir("a/b".into()),
        Op::Write("a/b/c".into(), 1),
        Op::Write("a/d".into(), 2),
        Op::Link("a/d".into(), "a/b/d".into()),
    ];
    let middle = [Op::Rename("a".into(), "b".into()), Op::Write("b/x".into(), 3), Op::Mkdir("a".into())];
    let upper = [
        Op::Rename("b/b".into(), "a/c".into()),
        Op::Chmod("a/c/c".into(), 0o600),
        Op::Rename("b".into(), "d".into()),
    ];
    for options in OPTIONS {
        reproduces(&lower, &middle, &upper, options, Marks::Trusted);
    }
}

#[test]
fn an_overlay_in_an_overlay_keeps_its_marks() {
    let place = Place::new();
    let (lower, upper, view) = (place.at("lower"), place.at("upper"), place.at("view"));
    fs::create_dir(&lower).unwrap();
    let overlay = Overlay::mount(&view, Some((&upper, &place.at("work"))), &[&lower], "");
    fs::create_dir(view.join("d")).unwrap();
    super::tree::set_xattr(&view.join("d"), "trusted.overlay.opaque", b"y");
    let shown = seen(&view);
    drop(overlay);
    let stack = Stack::open(&upper, std::slice::from_ref(&lower), Marks::Trusted).unwrap();
    let (target, layer) = (place.at("target"), place.at("layer"));
    publish_as(&stack, &target, Form::Merged);
    assert_same_as(&shown, &target);
    publish_as(&stack, &layer, Form::Layer);
    let _overlay = Overlay::mount(&view, None, &[&layer, &lower], "");
    assert_same_as(&shown, &view);
}
