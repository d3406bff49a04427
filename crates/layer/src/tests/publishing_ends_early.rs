//! What is left of a publication that fails, is stopped, or crashes, and of two at once.

use std::fs;
use std::io;
use std::path::Path;

use super::publish;
use super::publishing::{World, stage};
use super::tree::seen;
use crate::{LayerError, Marks, PublishOptions, Stack, Target};

#[test]
fn two_that_publish_at_once_lose_nothing() {
    let world = World::new();
    let uppers: Vec<_> = (0..6).map(|at| world.at(&format!("upper{at}"))).collect();
    for upper in &uppers {
        fs::create_dir_all(upper).unwrap();
        fs::write(upper.join(upper.file_name().unwrap()), "x").unwrap();
    }
    std::thread::scope(|scope| {
        for upper in &uppers {
            scope.spawn(|| {
                let stack = Stack::open(upper, &[world.at("layer")], Marks::Trusted).unwrap();
                publish(&stack, &world.at("volume/out"), &PublishOptions::default()).unwrap();
            });
        }
    });
    assert_eq!(world.names("volume/out").len(), 6);
    assert_eq!(world.names("volume"), ["out"]);
}

#[test]
fn what_a_crash_leaves_is_removed_by_the_next() {
    let world = World::new();
    world.write("upper/a", "1");
    world.write("volume/out/old", "0");
    let before = seen(&world.at("volume/out"));
    let options = PublishOptions::default();
    let (staging, _) = stage(&world.stack(), &world.at("volume/out"), &options).unwrap();
    staging.leave();
    assert_eq!(world.names("volume"), [".out.hayloft-new", "out"]);
    assert_eq!(seen(&world.at("volume/out")), before);

    // After the exchange and before the old version was removed.
    let (mut staging, _) = stage(&world.stack(), &world.at("volume/out"), &options).unwrap();
    staging.commit().unwrap();
    staging.leave();
    let left = world.names("volume/.out.hayloft-new");
    assert_eq!((left.len(), left[0].as_str()), (2, "lock"));
    assert_eq!(world.names(&format!("volume/.out.hayloft-new/{}", left[1])), ["old"]);
    assert_eq!(world.names("volume/out"), ["a", "old"]);
    world.publish();
    assert_eq!(world.names("volume"), ["out"]);

    // One that is dropped cleans up by itself.
    drop(stage(&world.stack(), &world.at("volume/out"), &options).unwrap());
    assert_eq!(world.names("volume"), ["out"]);
}

#[test]
fn failing_leaves_the_target_as_it_was() {
    let world = World::new();
    world.write("upper/a", "1");
    world.write("volume/out/old", "0");
    let before = seen(&world.at("volume/out"));
    let full = |_: &Path| Err(io::Error::from(io::ErrorKind::StorageFull));
    let options = PublishOptions { durable: Some(&full), ..Default::default() };
    let error = publish(&world.stack(), &world.at("volume/out"), &options).unwrap_err();
    assert!(error.to_string().starts_with("cannot make durable"), "{error}");
    assert_eq!(seen(&world.at("volume/out")), before);
    assert_eq!(world.names("volume"), ["out"]);
    let error = publish(&world.stack(), &world.at("volume/out/old"), &options).unwrap_err();
    assert!(matches!(error, LayerError::Target { .. }), "{error}");
    for path in ["../x", "/x", "x/..", "."] {
        let error = Target::open(&world.at("volume"), Path::new(path)).unwrap_err();
        assert!(matches!(error, LayerError::Target { .. }), "{error}");
    }
    assert_eq!(world.names("volume"), ["out"]);
}

#[test]
fn what_is_there_and_perhaps_not_durable_is_told_as_that() {
    let world = World::new();
    world.write("upper/a", "1");
    world.write("volume/out/old", "0");
    let calls = std::cell::Cell::new(0);
    // The second call is after the new version has taken its place.
    let breaks = |_: &Path| {
        calls.set(calls.get() + 1);
        if calls.get() == 1 { Ok(()) } else { Err(io::Error::from(io::ErrorKind::StorageFull)) }
    };
    let options = PublishOptions { durable: Some(&breaks), ..Default::default() };
    let error = publish(&world.stack(), &world.at("volume/out"), &options).unwrap_err();
    assert!(matches!(error, LayerError::NotDurable { .. }), "{error}");
    assert!(error.to_string().contains("not known to be durable"), "{error}");
    assert_eq!(world.names("volume/out"), ["a", "old"]);
    publish(&world.stack(), &world.at("volume/out"), &PublishOptions::default()).unwrap();
    assert_eq!(world.names("volume"), ["out"]);
}

#[test]
fn who_stops_leaves_the_target_as_it_was() {
    let world = World::new();
    world.write("upper/a", "1");
    world.write("volume/out/old", "0");
    let options = PublishOptions { stop: Some(&|| true), ..Default::default() };
    publish(&world.stack(), &world.at("volume/out"), &options).unwrap_err();
    assert_eq!((world.names("volume"), world.names("volume/out")), (vec!["out".into()], vec!["old".into()]));
}

#[test]
fn nothing_published_below_is_lost() {
    let world = World::new();
    world.write("upper/a", "1");
    world.write("volume/builds/old", "0");
    let options = PublishOptions::default();
    for outer in ["builds", "builds/nightly"] {
        let stack = world.stack();
        let open = |path: &str| Target::open(&world.at("volume"), Path::new(path)).unwrap();
        let (mut staging, _) = crate::publication::publish::stage(&stack, open(outer), &options).unwrap();
        std::thread::scope(|scope| {
            for at in 0..3 {
                let world = &world;
                scope.spawn(move || {
                    let path = format!("builds/nightly/{at}");
                    let target = Target::open(&world.at("volume"), Path::new(&path)).unwrap();
                    crate::publish(&world.stack(), target, &PublishOptions::default()).unwrap();
                });
            }
            std::thread::sleep(std::time::Duration::from_millis(300));
            staging.commit().unwrap();
            staging.finish().unwrap();
        });
        for at in 0..3 {
            assert_eq!(world.names(&format!("volume/builds/nightly/{at}")), ["a"]);
            fs::remove_dir_all(world.at(&format!("volume/builds/nightly/{at}"))).unwrap();
        }
        // A process that another test starts has the locks as well until it has begun.
        let nothing_left = || {
            drop(Target::open(&world.at("volume"), Path::new("builds/nightly/none")).unwrap());
            world.names("volume").len() == 1 && world.names("volume/builds") == ["a", "nightly", "old"]
        };
        assert!((0..100).any(|_| nothing_left()), "{:?}", world.names("volume/builds"));
    }
}

#[test]
fn what_a_crash_leaves_is_not_published() {
    let world = World::new();
    world.write("upper/a", "1");
    world.write("volume/out/d/.x.hayloft-new/new/half", "0");
    world.write("volume/out/d/x", "0");
    world.publish();
    assert_eq!(world.names("volume/out/d"), ["x"]);
}
