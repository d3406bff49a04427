//! What differs between versions, where servers that know of no journal have written.

use hayloft_model::Ino;
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{CreateSnapshot, Diff, Difference, InodeRowMessage, Version, difference};
use prost::Message;

use crate::common::*;
use crate::packed::{change_rows, twelve};

/// The row that is written with everything, as such a server writes it.
#[derive(Clone, PartialEq, Message)]
struct MarkRow {
    #[prost(uint64, tag = "1")]
    mark: u64,
}

fn version(snapshot: &str) -> Option<Version> {
    Some(Version { volume: "vol".into(), snapshot: snapshot.into() })
}

fn snapshot(running: &Running, name: &str) {
    let ask = CreateSnapshot { of: version(name), note: String::new(), as_stored: true };
    Client::connect(running.address).ask(Ask::CreateSnapshot(ask)).unwrap();
}

fn differences(running: &Running, from: &str, to: &str) -> Vec<Difference> {
    let ask = Diff { from: version(from), to: version(to), ..Diff::default() };
    let Answer::Differences(told) = Client::connect(running.address).ask(Ask::Diff(ask)).unwrap() else {
        panic!("no differences")
    };
    told.differences
}

#[test]
fn what_a_server_that_knows_of_no_journal_has_changed_is_told() {
    let (folder, running, _client, rows) = twelve(true);
    snapshot(&running, "one");
    running.shutdown();
    let (ino, other) = {
        let mut numbers = rows.inodes.keys().rev();
        (*numbers.next().unwrap(), *numbers.next().unwrap())
    };
    let changed = |ino: Ino| {
        change_rows(folder.path(), false, move |key, value| match key[0] {
            b'I' if key[1..] == ino.0.to_be_bytes() => {
                let row = InodeRowMessage::decode(value).unwrap();
                Some(InodeRowMessage { mode: row.mode ^ 0o111, ..row }.encode_to_vec().into())
            }
            b'M' => {
                let row = MarkRow::decode(value).unwrap();
                Some(MarkRow { mark: row.mark + 1 }.encode_to_vec().into())
            }
            _ => None,
        });
    };
    changed(ino);
    let running = Running::start(config(folder.path()));
    snapshot(&running, "two");
    let modes = |from: &str, to: &str| {
        let told = differences(&running, from, to);
        assert!(told.iter().all(|told| told.changed == difference::MODE), "{told:?}");
        told.len()
    };
    assert_eq!((modes("one", "two"), modes("two", "one")), (1, 1));
    snapshot(&running, "three");
    assert_eq!((modes("two", "three"), modes("one", "three")), (0, 1));
    running.shutdown();
    changed(other);
    let running = Running::start(config(folder.path()));
    snapshot(&running, "four");
    let counts = ["one", "two", "three"].map(|from| differences(&running, from, "four").len());
    assert_eq!(counts, [2, 1, 1]);
    running.shutdown();
}
