//! Extended attributes.

use std::fs;

use crate::setup::calls::{self, errno};
use crate::setup::farm::{Farm, Place, run, sh};

#[test]
fn extended_attributes() {
    let mut place = Place::new();
    let file = place.join("file");
    fs::write(&file, b"x").unwrap();
    calls::set_xattr(&file, "user.comment", b"first", libc::XATTR_CREATE).unwrap();
    assert_eq!(errno(calls::set_xattr(&file, "user.comment", b"x", libc::XATTR_CREATE)), libc::EEXIST);
    calls::set_xattr(&file, "user.comment", b"second", libc::XATTR_REPLACE).unwrap();
    assert_eq!(errno(calls::set_xattr(&file, "user.none", b"x", libc::XATTR_REPLACE)), libc::ENODATA);
    calls::set_xattr(&file, "user.empty", b"", 0).unwrap();
    calls::set_xattr(&file, "trusted.overlay.opaque", b"y", 0).unwrap();
    calls::set_xattr(place.path(), "user.on-a-directory", &[0, 255, 0], 0).unwrap();
    assert_eq!(errno(calls::get_xattr(&file, "user.none")), libc::ENODATA);
    place.remount();
    assert_eq!(calls::list_xattr(&file).unwrap(), ["trusted.overlay.opaque", "user.comment", "user.empty"]);
    assert_eq!(calls::get_xattr(&file, "user.comment").unwrap(), b"second");
    assert_eq!(calls::get_xattr(&file, "user.empty").unwrap(), b"");
    assert_eq!(calls::get_xattr(place.path(), "user.on-a-directory").unwrap(), [0, 255, 0]);
    calls::remove_xattr(&file, "user.comment").unwrap();
    assert_eq!(errno(calls::remove_xattr(&file, "user.comment")), libc::ENODATA);
    place.remount();
    assert_eq!(errno(calls::get_xattr(&file, "user.comment")), libc::ENODATA);
}

#[test]
fn a_volume_has_an_id_that_all_its_mounts_tell() {
    let (farm, mounts) = Farm::shared(2);
    fs::write(mounts[0].join("file"), b"x").unwrap();
    let id = calls::get_xattr(mounts[0].path(), "hayloft.volume").unwrap();
    assert!(!id.is_empty());
    assert_eq!(calls::get_xattr(&mounts[1].join("file"), "hayloft.volume").unwrap(), id);
    assert_eq!(calls::list_xattr(mounts[0].path()).unwrap(), [""; 0]);
    assert_eq!(errno(calls::set_xattr(mounts[0].path(), "hayloft.volume", b"x", 0)), libc::EOPNOTSUPP);
    farm.create("other");
    let other = farm.mount("other", "");
    assert_ne!(calls::get_xattr(other.path(), "hayloft.volume").unwrap(), id);
}

#[test]
fn limits_of_extended_attributes() {
    let mut place = Place::new();
    let file = place.join("file");
    fs::write(&file, b"x").unwrap();
    let longest_name = format!("user.{}", "n".repeat(250));
    calls::set_xattr(&file, &longest_name, b"v", 0).unwrap();
    assert_eq!(errno(calls::set_xattr(&file, &format!("{longest_name}n"), b"v", 0)), libc::ERANGE);
    assert_eq!(errno(calls::set_xattr(&file, "user.large", &vec![1; 65_537], 0)), libc::E2BIG);
    // Local file systems differ in how much a value may hold; what is accepted must come back whole.
    let value = vec![2; 60_000];
    match calls::set_xattr(&file, "user.large", &value, 0) {
        Ok(()) => {
            place.remount();
            assert_eq!(calls::get_xattr(&file, "user.large").unwrap(), value);
        }
        Err(error) => assert!(matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::E2BIG)), "{error}"),
    }
}

#[test]
fn capabilities_are_kept_and_cleared_by_a_write() {
    let mut place = Place::new();
    let file = place.join("ping");
    fs::write(&file, b"#!/bin/sh\n").unwrap();
    // VFS_CAP_REVISION_2, cap_net_raw permitted.
    let value = [1, 0, 0, 2, 0, 32, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    calls::set_xattr(&file, "security.capability", &value, 0).unwrap();
    place.remount();
    assert_eq!(calls::get_xattr(&file, "security.capability").unwrap(), value);
    fs::write(&file, b"changed").unwrap();
    assert_eq!(errno(calls::get_xattr(&file, "security.capability")), libc::ENODATA);
}

#[test]
fn access_control_lists_are_refused_clearly() {
    if std::env::var_os("HAYLOFT_E2E_PLAIN").is_some() {
        return; // Local file systems have them.
    }
    let place = Place::new();
    let file = place.join("file");
    fs::write(&file, b"x").unwrap();
    for name in ["system.posix_acl_access", "system.posix_acl_default"] {
        // Version 2; owner rw-, group r--, others r--.
        let entry = |tag: u8, rights: u8| [tag, 0, rights, 0, 255, 255, 255, 255];
        let acl = [&[2, 0, 0, 0][..], &entry(1, 6), &entry(4, 4), &entry(32, 4)].concat();
        assert_eq!(errno(calls::set_xattr(place.path(), name, &acl, 0)), libc::EOPNOTSUPP);
        assert_eq!(errno(calls::get_xattr(&file, name)), libc::EOPNOTSUPP);
    }
    let out = run(&mut sh(&format!("setfacl -m u:1:rw {} 2>&1 || true", file.display())));
    assert!(out.contains("not supported"), "{out}");
    run(&mut sh(&format!("cp -a {0} {0}.copy && getfacl {0}.copy", file.display())));
}
