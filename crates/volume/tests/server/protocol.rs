//! Sessions, commits and reads, as a client sees them.

use std::time::Duration;

use crate::common::*;
use bytes::Bytes;
use hayloft_model::{BlockRef, Content, ContentHash, FileKind, Ino, Name, Record};
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{
    AllocateInos, Bury, Claim, DeleteVolume, FailureCode, FetchInode, FetchPages, Goodbye, Hello,
    ListVolumes, SetQuota, ShowVolume, StatsRequest, StatusRequest, SweepVolume, Welcome, encode_blocks,
};

#[test]
fn a_tree_is_written_read_and_found_again_after_a_restart() {
    let (folder, running) = started();
    let (mut client, welcome) = Client::open(running.address, hello(7)).unwrap();
    assert_eq!((welcome.last_sequence, welcome.lease_ms), (0, 600));
    let first = welcome.inos.unwrap().next;
    let (dir, small, big) = (first, first + 1, first + 2);
    let text = Bytes::from(b"all the hay ".repeat(3000));
    let small_block = client.content(&text);
    // More than a pack's worth, with a second page of blocks.
    let blocks: Vec<Option<BlockRef>> = (0..150).map(|n| Some(client.content(&noise(n, 65536)))).collect();
    let records = [
        put(1, directory(1, 1, 5)),
        link(1, "dir", dir, FileKind::Directory, 3),
        link(1, "inline", big + 1, FileKind::Regular, 4),
        put(big + 1, file_in(1, Content::Inline(Bytes::from_static(b"short")), 5)),
        put(dir, directory(1, 0, 5)),
        link(dir, "small", small, FileKind::Regular, 3),
        put(small, file_in(dir, Content::Blocks(vec![Some(small_block)]), 36000)),
        link(dir, "big", big, FileKind::Regular, 4),
        put(big, file_in(dir, Content::Blocks(blocks[..64].to_vec()), 150 * 65536)),
        Record::PutPage(Ino(big), 1, blocks[64..128].to_vec()),
        Record::PutPage(Ino(big), 2, blocks[128..].to_vec()),
    ];
    let usage = (5 + 36000 + 150 * 65536, 4);
    assert_eq!(client.commit(1, &records, usage).unwrap(), 1);
    let mut rows = hayloft_model::Rows::default();
    records.iter().for_each(|record| rows.apply(record));
    compare_tree(&mut client, &rows);

    let listings = client.enter(1, 1 << 20).unwrap();
    assert_eq!(listings.dirs[0].dir, 1);
    assert_eq!(listings.contents.len(), 1, "the small file's content came along");
    assert_eq!(decode(listings.contents[0].clone(), small_block.hash), text);
    let Ok(Answer::Pages(pages)) = client.ask(Ask::FetchPages(FetchPages { ino: big })) else { panic!() };
    assert_eq!(pages.pages.len(), 2);
    assert_eq!(pages.pages[1].blocks, encode_blocks(&blocks[128..]));
    let hashes: Vec<ContentHash> = blocks.iter().flatten().map(|block| block.hash).collect();
    let verify = |client: &mut Client| {
        for (n, content) in client.fetch(&hashes).unwrap().into_iter().enumerate() {
            assert_eq!(content, noise(n as u64, 65536));
        }
    };
    verify(&mut client);
    let failed = client.fetch(&[ContentHash([9; 32])]).unwrap_err();
    assert_eq!(code(&failed), FailureCode::NotFound);
    assert!(failed.message.contains(&ContentHash([9; 32]).to_string()));
    assert_eq!(running.problems(), [""; 0]);

    running.shutdown();
    let running = Running::start(config(folder.path()));
    let (mut client, welcome) = Client::open(running.address, Hello { resume: true, ..hello(7) }).unwrap();
    assert_eq!(welcome.last_sequence, 1);
    assert!(welcome.inos.unwrap().next > big);
    let status = welcome.status.unwrap();
    assert_eq!((status.used_bytes, status.used_inodes), (usage.0 as u64, 4));
    compare_tree(&mut client, &rows);
    verify(&mut client);
    running.shutdown();
}

#[test]
fn a_commit_is_applied_exactly_once_over_reconnects_and_crashes() {
    let (folder, mut running) = started();
    let (mut client, _) = Client::open(running.address, hello(7)).unwrap();
    let records = |n: u64| {
        let inline = Content::Inline(Bytes::from(vec![b'x'; n as usize]));
        [
            put(1, directory(1, 0, 3 + n)),
            link(1, &format!("f{n}"), 100 + n, FileKind::Regular, 2 + n),
            put(100 + n, file(inline, n)),
        ]
    };
    let mut used = 0;
    for n in 1..=12u64 {
        assert_eq!(client.commit(n, &records(n), (n as i64, 1)).unwrap(), n);
        used += n;
        // Sent again: answered, and changes nothing.
        assert_eq!(client.commit(n, &records(n), (n as i64, 1)).unwrap(), n);
        let gap = client.commit(n + 2, &records(n), (n as i64, 1)).unwrap_err();
        assert_eq!(code(&gap), FailureCode::Invalid);
        if n % 4 == 0 {
            running.crash();
            running = Running::start(config(folder.path()));
        }
        if n % 2 == 0 {
            let resume = Hello { resume: true, ..hello(7) };
            let (again, welcome) = Client::open(running.address, resume).unwrap();
            assert_eq!(welcome.last_sequence, n);
            assert_eq!(welcome.status.unwrap().used_bytes, used);
            client = again;
        }
    }
    assert_eq!(running.problems(), ["inode 0"; 0]);
    // Pipelined, with a failure in between: nothing behind it is applied.
    let missing = Content::Blocks(vec![Some(BlockRef { hash: ContentHash([1; 32]), len: 5 })]);
    let asked = [
        client.send(Ask::Commit(commit(13, &records(13), (13, 1)))),
        client.send(Ask::Commit(commit(14, &[put(900, file(missing, 5))], (5, 1)))),
        client.send(Ask::Commit(commit(15, &records(15), (15, 1)))),
    ];
    let answers = asked.map(|request| client.receive(request));
    assert!(matches!(&answers[0], Answer::Committed(done) if done.sequence == 13));
    for answer in &answers[1..] {
        assert!(matches!(answer, Answer::Failed(failed) if code(failed) == FailureCode::NotFound));
    }
    assert_eq!(client.commit(14, &records(14), (14, 1)).unwrap(), 14);
    assert_eq!(client.commit(15, &records(15), (15, 1)).unwrap(), 15);
    running.shutdown();
}

fn ended(address: std::net::SocketAddr, session: u64) -> bool {
    let again = Client::greet(address, Hello { resume: true, ..hello(session) });
    again.is_err_and(|failed| code(&failed) == FailureCode::SessionEnded)
}

#[test]
fn sessions_end_by_goodbye_or_by_proof_and_come_back_otherwise() {
    let (folder, running) = started();
    let address = running.address;
    let (mut one, _) = Client::open(address, hello(1)).unwrap();
    let foreign = Hello { host_id: "other".into(), ..hello(2) };
    let (mut two, welcome) = Client::open(address, foreign).unwrap();
    assert_eq!(welcome.lost, []);
    let bury = |session| Ask::Bury(Bury { session });
    assert_eq!(code(&two.ask(bury(1)).unwrap_err()), FailureCode::Invalid, "it is connected");
    drop(one);
    assert_eq!(code(&two.ask(bury(1)).unwrap_err()), FailureCode::Invalid, "it is of another host");
    // Nobody needs what it holds: it comes back whenever it likes.
    std::thread::sleep(Duration::from_millis(1000));
    (one, _) = Client::open(address, Hello { resume: true, ..hello(1) }).unwrap();
    drop(one);
    let lost = |welcome: Welcome| welcome.lost.iter().map(|peer| peer.session).collect::<Vec<_>>();
    let (mut three, welcome) = Client::open(address, hello(3)).unwrap();
    if lost(welcome).is_empty() {
        // The end of a connection is seen within moments.
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(matches!(three.ask(bury(1)), Ok(Answer::Done(_))));
    assert!(ended(address, 1));
    drop(three);
    let (mut four, _) = Client::open(address, Hello { takes_over: 3, ..hello(4) }).unwrap();
    assert!(ended(address, 3));
    four.send(Ask::Goodbye(Goodbye {}));
    four.ask(Ask::Status(StatusRequest {})).unwrap();
    assert!((0..100).any(|_| {
        std::thread::sleep(Duration::from_millis(5));
        ended(address, 4)
    }));
    drop(two);
    // A restarted server knows the session.
    running.crash();
    let running = Running::start(config(folder.path()));
    // Of whom only its own host can know whether it is dead, and is told.
    let (_five, welcome) = Client::open(running.address, hello(5)).unwrap();
    assert!(welcome.lost.is_empty());
    let (_six, welcome) =
        Client::open(running.address, Hello { host_id: "other".into(), ..hello(6) }).unwrap();
    assert_eq!(lost(welcome), [2]);
    Client::open(running.address, Hello { resume: true, ..hello(2) }).unwrap();
    let old = Hello { protocol: 99, ..hello(7) };
    assert_eq!(code(&Client::greet(running.address, old).err().unwrap()), FailureCode::Protocol);
    running.shutdown();
}

#[test]
fn a_session_says_first_what_it_owns() {
    let (_folder, running) = started();
    let (mut client, _) = Client::greet(running.address, hello(1)).unwrap();
    assert_eq!(code(&client.enter(1, 0).unwrap_err()), FailureCode::Invalid);
    assert!(matches!(client.ask(Ask::Claim(Claim::default())), Ok(Answer::Claimed(_))));
    assert!(client.enter(1, 0).unwrap().dirs[0].own, "alone in the volume");
    assert_eq!(code(&client.ask(Ask::Claim(Claim::default())).unwrap_err()), FailureCode::Invalid);
    running.shutdown();
}

#[test]
fn what_a_session_had_open_goes_with_it() {
    let (_folder, running) = started();
    let (mut client, _) = Client::open(running.address, hello(1)).unwrap();
    let mut unlinked = file(Content::Inline(Bytes::from_static(b"temp")), 4);
    unlinked.nlink = 0;
    let mut batch = commit(1, &[put(50, unlinked)], (0, 0));
    batch.orphans = vec![50];
    client.ask(Ask::Commit(batch)).unwrap();
    client.ask(Ask::FetchInode(FetchInode { ino: 50 })).unwrap();
    assert_eq!(running.problems(), [""; 0]);
    drop(client);
    let (mut client, welcome) = Client::open(running.address, Hello { takes_over: 1, ..hello(2) }).unwrap();
    let status = welcome.status.unwrap();
    assert_eq!((status.used_bytes, status.used_inodes), (0, 0));
    let gone = client.ask(Ask::FetchInode(FetchInode { ino: 50 })).unwrap_err();
    assert_eq!(code(&gone), FailureCode::NotFound);
    assert_eq!(running.problems(), [""; 0]);
    running.shutdown();
}

#[test]
fn quotas_stop_growth_and_nothing_else() {
    let (_folder, running) = started();
    let quota = SetQuota { name: "vol".into(), quota_bytes: 1000, quota_inodes: 2 };
    Client::connect(running.address).ask(Ask::SetQuota(quota)).unwrap();
    let (mut client, _) = Client::open(running.address, hello(1)).unwrap();
    let records = [
        put(1, directory(1, 0, 4)),
        link(1, "a", 20, FileKind::Regular, 3),
        put(20, file(Content::Inline(vec![1; 900].into()), 900)),
    ];
    client.commit(1, &records, (900, 1)).unwrap();
    let more = [put(20, file(Content::Inline(vec![1; 1100].into()), 1100))];
    let full = client.commit(2, &more, (200, 0)).unwrap_err();
    assert_eq!(code(&full), FailureCode::NoSpace);
    client
        .commit(2, &[Record::DeleteDentry(Ino(1), Name::new(b"a")), Record::DeleteInode(Ino(20))], (-900, -1))
        .unwrap();
    let Ok(Answer::Inos(range)) = client.ask(Ask::AllocateInos(AllocateInos { count: 10 })) else { panic!() };
    assert_eq!(range.end - range.next, 10);
    running.shutdown();
}

#[test]
fn volumes_are_made_shown_and_deleted() {
    let (folder, running) = started();
    let mut admin = Client::connect(running.address);
    let create = hayloft_wire::CreateVolume { name: "vol".into(), ..Default::default() };
    assert_eq!(code(&admin.ask(Ask::CreateVolume(create)).unwrap_err()), FailureCode::Exists);
    let create = hayloft_wire::CreateVolume { name: "../x".into(), ..Default::default() };
    assert_eq!(code(&admin.ask(Ask::CreateVolume(create)).unwrap_err()), FailureCode::Invalid);
    let (mut client, _) = Client::open(running.address, hello(1)).unwrap();
    let block = client.content(&noise(1, 60000));
    for n in 0..5 {
        client.content(&noise(n + 5, 65536));
    }
    client
        .commit(
            1,
            &[
                put(1, directory(1, 0, 4)),
                link(1, "f", 30, FileKind::Regular, 3),
                put(30, file(Content::Blocks(vec![Some(block)]), 60000)),
            ],
            (60000, 1),
        )
        .unwrap();
    let delete = || Ask::DeleteVolume(DeleteVolume { name: "vol".into(), snapshots: false });
    assert_eq!(code(&admin.ask(delete()).unwrap_err()), FailureCode::Busy);
    let Ok(Answer::Volumes(shown)) = admin.ask(Ask::ShowVolume(ShowVolume {
        name: "vol".into(),
        reclaimable: false,
        ..ShowVolume::default()
    })) else {
        panic!()
    };
    let clients = &shown.volumes[0].clients;
    assert_eq!((clients.len(), clients[0].last_sequence, clients[0].connected), (1, 1, true));
    let Ok(Answer::Stats(stats)) = admin.ask(Ask::Stats(StatsRequest {})) else { panic!() };
    for key in ["\"uptime_seconds\"", "\"COMMIT\"", "\"vol\"", "\"p99\"", "\"put\""] {
        assert!(stats.json.contains(key), "{key} in {}", stats.json);
    }
    let Ok(Answer::Swept(_)) = admin.ask(Ask::SweepVolume(SweepVolume { name: "vol".into() })) else {
        panic!()
    };
    client.send(Ask::Goodbye(Goodbye {}));
    client.ask(Ask::Status(StatusRequest {})).unwrap();
    assert!((0..100).any(|_| {
        std::thread::sleep(Duration::from_millis(5));
        admin.ask(delete()).is_ok()
    }));
    let Ok(Answer::Volumes(all)) = admin.ask(Ask::ListVolumes(ListVolumes {})) else { panic!() };
    assert!(all.volumes.is_empty());
    let gone = Client::open(running.address, hello(2)).err().unwrap();
    assert_eq!(code(&gone), FailureCode::NotFound);
    running.shutdown();
    let left: Vec<_> = ["packs", "volumes", "registry"]
        .iter()
        .filter_map(|part| std::fs::read_dir(folder.path().join(part)).ok())
        .flatten()
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_newer_connection_of_a_session_closes_the_older_one() {
    let (_folder, running) = started();
    let (mut old, _) = Client::open(running.address, hello(1)).unwrap();
    old.commit(1, &[put(20, file(Content::None, 0))], (0, 1)).unwrap();
    let request = old.send(Ask::Commit(commit(2, &[put(21, file(Content::None, 0))], (0, 1))));
    let resume = Hello { resume: true, ..hello(1) };
    let (mut new, welcome) = Client::open(running.address, resume).unwrap();
    match old.receive_or_end(request) {
        Some(Answer::Committed(_)) => assert_eq!(welcome.last_sequence, 2),
        Some(Answer::Failed(failed)) => assert_eq!(code(&failed), FailureCode::Unavailable),
        None => {}
        other => panic!("{other:?}"),
    }
    assert!(old.is_closed_soon());
    let next = welcome.last_sequence + 1;
    new.commit(next, &[put(30, file(Content::None, 0))], (0, 1)).unwrap();
    running.shutdown();
}

#[test]
fn a_server_that_was_replaced_acknowledges_nothing_more() {
    let (folder, old) = started();
    let (mut client, _) = Client::open(old.address, hello(1)).unwrap();
    let records = |n: u64| [put(20 + n, file(Content::None, 0)), put(1, directory(1, 0, 3))];
    client.commit(1, &records(1), (0, 1)).unwrap();
    let new = Running::start(config(folder.path()));
    let resume = Hello { resume: true, ..hello(1) };
    let (mut moved, welcome) = Client::open(new.address, resume).unwrap();
    assert_eq!(welcome.last_sequence, 1);
    let asked = client.send(Ask::Commit(commit(2, &records(2), (0, 1))));
    assert!(client.receive_or_end(asked).is_none(), "so that the client connects anew, perhaps elsewhere");
    moved.commit(2, &records(3), (0, 1)).unwrap();
    assert!(moved.ask(Ask::FetchInode(FetchInode { ino: 22 })).is_err());
    moved.ask(Ask::FetchInode(FetchInode { ino: 23 })).unwrap();
    new.shutdown();
    old.shutdown();
}
