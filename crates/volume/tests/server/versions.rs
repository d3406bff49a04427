//! Clients and stores of other versions: they work, or hear why not.

use std::fs;

use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{FailureCode, Hello, ListClients, PROTOCOL, PROTOCOL_OLDEST, ShowVolume};
use prost::Message;

use crate::common::*;

/// What a mount of protocol 7 said first: the bytes of its [`Hello`], from before there was more than a number.
const HELLO_OF_7: &str =
    "08071203766f6c18b9602a04686f737432046261726e382a52042f6d6e747210000102030405060708090a0b0c0d0e0f";

fn bytes(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

#[test]
fn a_client_of_the_version_before_works_or_hears_why_not() {
    let (_folder, running) = started();
    let old = Hello::decode(&*bytes(HELLO_OF_7)).unwrap();
    assert_eq!((old.protocol, old.oldest, &*old.volume, old.session), (7, 0, "vol", 12345));
    let greeted = Client::greet(running.address, old);
    assert_eq!(greeted.is_ok(), (PROTOCOL_OLDEST..=PROTOCOL).contains(&7));
    match greeted {
        Ok((_client, welcome)) => assert_eq!(welcome.protocol, 7),
        Err(failed) => {
            assert_eq!(code(&failed), FailureCode::Protocol);
            assert!(failed.message.contains("install the server's version on this host"), "{failed:?}");
        }
    }
    running.shutdown();
}

#[test]
fn a_newer_client_speaks_what_the_server_does_or_hears_why_not() {
    let (_folder, running) = started();
    // It still speaks our protocol, and has features that nobody knows here.
    let newer = Hello { protocol: PROTOCOL + 1, oldest: PROTOCOL, features: u64::MAX, ..hello(1) };
    let newer = Hello { release: "9.9.9".into(), ..newer };
    let (_client, welcome) = Client::open(running.address, newer.clone()).unwrap();
    assert_eq!((welcome.protocol, welcome.features & !hayloft_wire::FEATURES), (PROTOCOL, 0));
    let listed = Client::connect(running.address).ask(Ask::ListClients(ListClients::default())).unwrap();
    let Answer::Clients(listed) = listed else { panic!("{listed:?}") };
    assert_eq!((listed.clients[0].protocol, &*listed.clients[0].release), (PROTOCOL, "9.9.9"));
    let refused = |hello: Hello| {
        let failed = Client::greet(running.address, hello).err().expect("refused");
        assert_eq!(code(&failed), FailureCode::Protocol);
        failed.message
    };
    let said = refused(Hello { oldest: PROTOCOL + 1, session: 2, ..newer.clone() });
    assert!(said.contains("install this version at the server first"), "{said}");
    assert!(said.contains("9.9.9"), "{said}");
    let said = refused(Hello { needs: 1 << 40, session: 2, ..newer });
    assert!(said.contains("the client needs") && said.contains("0x10000000000"), "{said}");
    running.shutdown();
}

/// The entries of the volume in the registry, changed.
fn rewrite(folder: &std::path::Path, change: impl Fn(String) -> String) -> Vec<Vec<u8>> {
    let rewritten = ["registry/vol", "registry-copy/vol"].map(|entry| {
        let path = folder.join(entry);
        let entry = change(fs::read_to_string(&path).unwrap());
        fs::write(path, &entry).unwrap();
        entry.into_bytes()
    });
    rewritten.into()
}

fn entries(folder: &std::path::Path) -> Vec<Vec<u8>> {
    ["registry/vol", "registry-copy/vol"].map(|entry| fs::read(folder.join(entry)).unwrap()).into()
}

#[test]
fn a_volume_of_an_older_format_is_raised_when_it_is_opened() {
    let (folder, running) = started();
    running.shutdown();
    // As it was before there was a number, and a checksum.
    let old = rewrite(folder.path(), |entry| {
        let mut entry: serde_json::Value = serde_json::from_str(&entry).unwrap();
        let fields = entry.as_object_mut().unwrap();
        assert!(fields.remove("format").is_some() && fields.remove("checksum").is_some());
        entry.to_string()
    });
    let running = Running::start(config(folder.path()));
    let (mut client, _) = Client::open(running.address, hello(1)).unwrap();
    assert!(client.enter(1, 0).unwrap().dirs[0].own);
    drop(client);
    let raised = entries(folder.path());
    assert!(raised != old && raised[0] == raised[1]);
    assert!(String::from_utf8_lossy(&raised[0]).contains("\"format\": 1"));
    assert_eq!(running.problems(), [""; 0]);
    running.shutdown();
}

#[test]
fn a_volume_of_a_newer_format_is_refused_in_words_and_left_alone() {
    let (folder, running) = started();
    running.shutdown();
    let sealed = |entry: String| {
        // With the checksum that it would have, as a later version makes it: of all else, by name.
        let mut entry: std::collections::BTreeMap<String, serde_json::Value> =
            serde_json::from_str(&entry).unwrap();
        entry.remove("checksum");
        entry.insert("format".into(), 4.into());
        entry.insert("unheard_of".into(), "x".into());
        let sum = blake3::hash(&serde_json::to_vec(&entry).unwrap()).to_hex()[..16].to_owned();
        entry.insert("checksum".into(), sum.into());
        serde_json::to_string(&entry).unwrap()
    };
    let newer = rewrite(folder.path(), sealed);
    let running = Running::start(config(folder.path()));
    let mounted = Client::open(running.address, hello(1)).err().expect("refused");
    let shown = Client::connect(running.address).ask(Ask::ShowVolume(ShowVolume {
        name: "vol".into(),
        reclaimable: false,
        ..ShowVolume::default()
    }));
    for failed in [mounted, shown.unwrap_err()] {
        assert_eq!(code(&failed), FailureCode::Protocol, "{failed:?}");
        assert!(failed.message.contains("volume vol has format 4"), "{failed:?}");
        assert!(failed.message.contains("start the version of hayloft that wrote it"), "{failed:?}");
    }
    assert_eq!(entries(folder.path()), newer);
    running.shutdown();
}
