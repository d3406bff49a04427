//! What peers without a right, or with a small one, try: docs/security.md lists it. Those of another user need root.

use std::net::SocketAddr;

use bytes::Bytes;
use hayloft_model::{Content, FileKind};
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{
    Acquire, AllocateInos, Bury, ChangeRequest, CheckVolume, Claim, CreateSnapshot, CreateVolume, CutFile,
    DeleteSnapshot, DeleteVolume, Diff, EvictClient, FailureCode, Fork, FrameOf, GrantMessage, Hello,
    ListClients, ListSnapshots, ListVolumes, LockKind, LockMessage, LockRequest, NameTree, ObjectMessage,
    Promote, ReadParts, Rollback, SetQuota, SetRights, ShowVolume, SignSnapshot, StatsRequest, SweepVolume,
    Version,
};
use rustix::process::{Uid, geteuid};
use rustix::thread::set_thread_res_uid;

use crate::common::*;

const NOBODY: u32 = 65_534;

/// A connection of another user of this host; `None` without root.
fn connect_as(uid: u32, address: SocketAddr) -> Option<Client> {
    if !geteuid().is_root() {
        eprintln!("left out: only root can be others");
        return None;
    }
    // One thread becomes the user; its socket stays that user's.
    let connecting = std::thread::spawn(move || {
        let uid = Uid::from_raw(uid);
        set_thread_res_uid(uid, uid, uid).unwrap();
        Client::connect(address)
    });
    Some(connecting.join().unwrap())
}

fn grant(address: SocketAddr, who: &str, right: &str) {
    let grant = GrantMessage { who: who.into(), right: right.into(), from: Vec::new() };
    let set = SetRights { name: "vol".into(), grant: Some(grant), trusted: None };
    Client::connect(address).ask(Ask::SetRights(set)).unwrap();
}

fn refusal(client: &mut Client, body: Ask) -> FailureCode {
    let said = format!("{body:?}");
    match client.ask(body) {
        Err(failed) => code(&failed),
        Ok(answer) => panic!("{said} was answered with {answer:?}"),
    }
}

/// All that administers.
fn administration() -> Vec<Ask> {
    let name = || "vol".to_owned();
    let version = || Some(Version { volume: name(), snapshot: "s".into() });
    vec![
        Ask::CreateVolume(CreateVolume { name: "mine".into(), mode: 0o777, ..CreateVolume::default() }),
        Ask::DeleteVolume(DeleteVolume { name: name(), snapshots: false }),
        Ask::SetQuota(SetQuota { name: name(), quota_bytes: 1, quota_inodes: 1 }),
        Ask::SetRights(SetRights {
            name: name(),
            grant: Some(GrantMessage { who: "uid:65534".into(), right: "admin".into(), from: Vec::new() }),
            trusted: Some(true),
        }),
        Ask::EvictClient(EvictClient { volume: name(), session: 1 }),
        Ask::SweepVolume(SweepVolume { name: name() }),
        Ask::CreateSnapshot(CreateSnapshot { of: version(), ..CreateSnapshot::default() }),
        Ask::DeleteSnapshot(DeleteSnapshot { of: version() }),
        Ask::Fork(Fork { of: version(), name: "mine".into(), as_stored: true }),
        Ask::Rollback(Rollback { to: version(), ..Rollback::default() }),
        Ask::Promote(Promote { fork: name(), ..Promote::default() }),
        Ask::SignSnapshot(SignSnapshot {
            of: version(),
            tree: format!("tree1-{:064}", 0),
            signature: "mine".into(),
        }),
        Ask::CheckVolume(CheckVolume { name: name(), content: true, ..CheckVolume::default() }),
    ]
}

#[test]
fn a_user_without_a_right_can_do_nothing_and_sees_nothing() {
    let (_folder, server) = started();
    let (_client, _) = Client::open(server.address, hello(1)).unwrap();
    let Some(mut stranger) = connect_as(NOBODY, server.address) else { return };
    for body in administration() {
        assert_eq!(refusal(&mut stranger, body), FailureCode::Denied);
    }
    let name = "vol".to_owned();
    assert_eq!(
        refusal(
            &mut stranger,
            Ask::ShowVolume(ShowVolume { name: name.clone(), reclaimable: false, ..ShowVolume::default() })
        ),
        FailureCode::Denied
    );
    assert_eq!(
        refusal(&mut stranger, Ask::ListClients(ListClients { volume: name.clone() })),
        FailureCode::Denied
    );
    let version = || Some(Version { volume: name.clone(), snapshot: String::new() });
    let ask = Ask::ListSnapshots(ListSnapshots { of: version() });
    assert_eq!(refusal(&mut stranger, ask), FailureCode::Denied);
    let ask = Ask::NameTree(NameTree { of: version(), anew: true });
    assert_eq!(refusal(&mut stranger, ask), FailureCode::Denied);
    let ask = Ask::CutFile(CutFile { of: version(), path: "x".into(), ..CutFile::default() });
    assert_eq!(refusal(&mut stranger, ask), FailureCode::Denied);
    let ask = Ask::ReadParts(ReadParts { of: version(), path: "x".into(), ..ReadParts::default() });
    assert_eq!(refusal(&mut stranger, ask), FailureCode::Denied);
    let ask = Ask::Diff(Diff { from: version(), to: version(), ..Diff::default() });
    assert_eq!(refusal(&mut stranger, ask), FailureCode::Denied);
    match stranger.ask(Ask::ListVolumes(ListVolumes {})).unwrap() {
        Answer::Volumes(found) => assert_eq!(found.volumes, []),
        other => panic!("{other:?}"),
    }
    match stranger.ask(Ask::ListClients(ListClients { volume: String::new() })).unwrap() {
        Answer::Clients(found) => assert_eq!(found.clients, []),
        other => panic!("{other:?}"),
    }
    match stranger.ask(Ask::Stats(StatsRequest {})).unwrap() {
        Answer::Stats(stats) => assert!(stats.json.contains("\"volumes\":{}"), "{}", stats.json),
        other => panic!("{other:?}"),
    }
    for read_only in [false, true] {
        let wants = Hello { read_only, ..hello(7) };
        assert_eq!(refusal(&mut stranger, Ask::Hello(wants)), FailureCode::Denied);
    }
    // A right on a volume is none to make others.
    grant(server.address, "uid:65534", "admin");
    let create = CreateVolume { name: "mine".into(), ..CreateVolume::default() };
    assert_eq!(refusal(&mut stranger, Ask::CreateVolume(create)), FailureCode::Denied);
    stranger
        .ask(Ask::ShowVolume(ShowVolume { name: "vol".into(), reclaimable: false, ..ShowVolume::default() }))
        .unwrap();
    assert_eq!(server.problems(), [""; 0]);
}

#[test]
fn who_administers_a_fork_gives_its_origin_no_other_tree() {
    let (_folder, server) = started();
    let mut master = Client::connect(server.address);
    let of = || Some(Version { volume: "vol".into(), snapshot: String::new() });
    master.ask(Ask::Fork(Fork { of: of(), name: "fork".into(), as_stored: true })).unwrap();
    let Some(mut other) = connect_as(NOBODY, server.address) else { return };
    let all = GrantMessage { who: "uid:65534".into(), right: "admin".into(), from: Vec::new() };
    master.ask(Ask::SetRights(SetRights { name: "fork".into(), grant: Some(all), trusted: None })).unwrap();
    let promote = || Ask::Promote(Promote { fork: "fork".into(), ..Promote::default() });
    assert_eq!(refusal(&mut other, promote()), FailureCode::Denied);
    grant(server.address, "uid:65534", "write");
    assert_eq!(refusal(&mut other, promote()), FailureCode::Denied);
    grant(server.address, "uid:65534", "admin");
    other.ask(promote()).unwrap();
    server.shutdown();
}

#[test]
fn who_may_only_read_changes_nothing() {
    let (_folder, server) = started();
    let (mut writer, _) = Client::open(server.address, hello(1)).unwrap();
    grant(server.address, "uid:65534", "read");
    let read = Hello { read_only: true, ..hello(9) };
    let mounted = || {
        let mut reader = connect_as(NOBODY, server.address)?;
        reader.ask(Ask::Hello(read.clone())).unwrap();
        Some(reader)
    };
    let Some(mut reader) = mounted() else { return };
    let object = ObjectMessage { ino: 1, ..ObjectMessage::default() };
    // It owns nothing that it could change.
    let claim = Claim { own: vec![object], ..Claim::default() };
    assert_eq!(refusal(&mut reader, Ask::Claim(claim)), FailureCode::Invalid);
    let mut reader = mounted().unwrap();
    reader.ask(Ask::Claim(Claim::default())).unwrap();
    for body in administration() {
        refusal(&mut reader, body);
    }
    refusal(&mut reader, Ask::Acquire(Acquire { object: Some(object) }));
    refusal(&mut reader, Ask::Change(ChangeRequest::default()));
    assert_eq!(refusal(&mut reader, Ask::AllocateInos(AllocateInos { count: 1 })), FailureCode::Denied);
    let exclusive = LockMessage {
        ino: 1,
        owner: 1,
        end: u64::MAX,
        kind: LockKind::Write as u32,
        flock: true,
        ..LockMessage::default()
    };
    let ask = LockRequest { lock: Some(exclusive), wait: false, test: false };
    assert_eq!(refusal(&mut reader, Ask::Lock(ask)), FailureCode::Denied);
    // Records end the connection, a commit without any changes nothing.
    reader.records(&[put(5, row(FileKind::Regular, 1)), link(1, "forged", 5, FileKind::Regular, 2)]);
    assert!(reader.is_closed_soon());
    let seen = writer.enter(1, 0).unwrap();
    assert!(!format!("{:?}", seen.dirs).contains("forged"));
    // As a writer it does not come in at all.
    let mut reader = connect_as(NOBODY, server.address).unwrap();
    assert_eq!(refusal(&mut reader, Ask::Hello(hello(10))), FailureCode::Denied);
    assert_eq!(server.problems(), [""; 0]);
}

#[test]
fn a_right_that_is_taken_away_ends_the_session_at_once() {
    let (_folder, server) = started();
    grant(server.address, "uid:65534", "write");
    let Some(mut client) = connect_as(NOBODY, server.address) else { return };
    client.ask(Ask::Hello(hello(3))).unwrap();
    client.ask(Ask::Claim(Claim::default())).unwrap();
    // What is enough for it does not disturb it.
    grant(server.address, "uid:65534", "admin");
    client.enter(1, 0).unwrap();
    grant(server.address, "uid:65534", "read");
    assert!(client.is_closed_soon());
    let mut again = connect_as(NOBODY, server.address).unwrap();
    let resume = Hello { resume: true, ..hello(3) };
    assert_eq!(refusal(&mut again, Ask::Hello(resume)), FailureCode::Denied);
}

#[test]
fn who_administers_a_volume_does_not_make_setuid_files_count_on_all_hosts() {
    let (_folder, server) = started();
    grant(server.address, "uid:65534", "admin");
    let Some(mut client) = connect_as(NOBODY, server.address) else { return };
    let mark =
        |trusted| Ask::SetRights(SetRights { name: "vol".into(), grant: None, trusted: Some(trusted) });
    assert_eq!(refusal(&mut client, mark(true)), FailureCode::Denied);
    Client::connect(server.address).ask(mark(true)).unwrap();
    client.ask(mark(true)).unwrap();
    client.ask(mark(false)).unwrap();
    assert_eq!(refusal(&mut client, mark(true)), FailureCode::Denied);
}

#[test]
fn a_session_is_not_taken_over_by_its_number() {
    let (_folder, server) = started();
    grant(server.address, "uid:*", "write");
    let owner = || Hello { token: Bytes::from_static(b"sixteen bytes...."), ..hello(1) };
    let (mut client, _) = Client::open(server.address, owner()).unwrap();
    let tries = [
        Hello { resume: true, ..hello(1) },
        hello(1),
        Hello { replaces: 1, ..hello(2) },
        Hello { resume: true, token: Bytes::from_static(b"guessed"), ..hello(1) },
    ];
    for attempt in &tries {
        let refused = refusal(&mut Client::connect(server.address), Ask::Hello(attempt.clone()));
        assert_eq!(refused, FailureCode::Denied, "{attempt:?}");
    }
    client.enter(1, 0).unwrap();
    // Not even with its token by another user, nor by who says that its process is dead.
    if let Some(mut other) = connect_as(NOBODY, server.address) {
        let resume = Hello { resume: true, ..owner() };
        assert_eq!(refusal(&mut other, Ask::Hello(resume)), FailureCode::Denied);
        drop(client);
        let (takes_over, mut liar) =
            (Hello { takes_over: 1, ..hello(8) }, connect_as(NOBODY, server.address).unwrap());
        liar.ask(Ask::Hello(takes_over)).unwrap();
        liar.ask(Ask::Claim(Claim::default())).unwrap();
        assert_eq!(refusal(&mut liar, Ask::Bury(Bury { session: 1 })), FailureCode::Invalid);
    }
    // Its owner goes on with it.
    let (mut client, _) = Client::open(server.address, Hello { resume: true, ..owner() }).unwrap();
    client.enter(1, 0).unwrap();
    // Nor when it was ended.
    let evict = EvictClient { volume: "vol".into(), session: 1 };
    Client::connect(server.address).ask(Ask::EvictClient(evict)).unwrap();
    let refused =
        refusal(&mut Client::connect(server.address), Ask::Hello(Hello { replaces: 1, ..hello(4) }));
    assert_eq!(refused, FailureCode::Denied);
}

#[test]
fn content_of_a_volume_is_not_to_be_had_by_another() {
    let (_folder, server) = started();
    let create = CreateVolume { name: "other".into(), mode: 0o755, ..CreateVolume::default() };
    Client::connect(server.address).ask(Ask::CreateVolume(create)).unwrap();
    let (mut owner, _) = Client::open(server.address, hello(1)).unwrap();
    let (mut thief, _) = Client::open(server.address, Hello { volume: "other".into(), ..hello(2) }).unwrap();
    // Above the size of what is kept in rows.
    for (sequence, len) in [(1, 500), (2, 60_000)] {
        let secret = noise(sequence, len);
        owner.begin(sequence, (len as i64, 1));
        let block = owner.content(&secret);
        let ino = 20 + sequence;
        let records = [
            put(1, directory(1, 0, ino + 1)),
            link(1, &format!("secret{sequence}"), ino, FileKind::Regular, ino),
            put(ino, file(Content::Blocks(vec![Some(block)]), len as u64)),
        ];
        owner.records(&records);
        owner.commit(sequence, &records, (len as i64, 1)).unwrap();
        assert_eq!(owner.fetch(&[block.hash]).unwrap(), [Bytes::from(secret)]);
        // By its hash, and by a file of one's own that names it.
        assert_eq!(code(&thief.fetch(&[block.hash]).unwrap_err()), FailureCode::NotFound);
        thief.begin(1, (len as i64, 1));
        thief.records(&records);
        thief.commit(1, &records, (len as i64, 1)).unwrap_err();
        assert_eq!(code(&thief.fetch(&[block.hash]).unwrap_err()), FailureCode::NotFound);
    }
    assert_eq!(server.problems(), [""; 0]);
}

#[test]
fn what_administrators_do_is_in_the_audit_log() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log/audit.log");
    let mut config = config(&folder.path().join("store"));
    config.audit = Some(log.clone());
    let server = Running::start(config);
    Client::create(server.address, 0);
    grant(server.address, "cert:build1", "write");
    let mut refused = 0;
    if let Some(mut stranger) = connect_as(NOBODY, server.address) {
        for _ in 0..1000 {
            refusal(&mut stranger, Ask::DeleteVolume(DeleteVolume { name: "vol".into(), snapshots: false }));
            refused += 1;
        }
    }
    let mend = CheckVolume { name: "vol".into(), repair: true, ..CheckVolume::default() };
    Client::connect(server.address).ask(Ask::CheckVolume(mend)).unwrap();
    Client::connect(server.address)
        .ask(Ask::DeleteVolume(DeleteVolume { name: "vol".into(), snapshots: false }))
        .unwrap();
    let text = std::fs::read_to_string(&log).unwrap();
    let lines: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let own = format!("uid:{}", geteuid().as_raw());
    let outcomes = |act: &str, who: &str| {
        let is_it =
            |line: &&serde_json::Value| line["act"] == act && line["who"] == who && line["volume"] == "vol";
        let found: Vec<&str> =
            lines.iter().filter(is_it).map(|line| line["outcome"].as_str().unwrap()).collect();
        found
    };
    for act in ["create", "rights", "repair", "delete"] {
        assert_eq!(outcomes(act, &own), ["begins", "done"], "{text}");
    }
    assert!(lines.iter().all(|line| line["from"].as_str().unwrap().starts_with("127.0.0.1:")));
    assert!(lines.iter().all(|line| line["time"].as_f64().unwrap() > 1.7e9));
    // Strangers do not fill the disk.
    assert_eq!(outcomes("delete", "uid:65534").len(), refused.min(100));
    use std::os::unix::fs::PermissionsExt;
    let mode = |path: &std::path::Path| path.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&log), mode(log.parent().unwrap())), (0o600, 0o700));
}

#[test]
fn what_the_audit_log_cannot_take_is_not_done() {
    let folder = tempfile::tempdir().unwrap();
    let before = Running::start(config(folder.path()));
    Client::create(before.address, 0);
    before.shutdown();
    // A disk without room.
    let full = hayloft_volume::Config { audit: Some("/dev/full".into()), ..config(folder.path()) };
    let server = Running::start(full);
    let (volume, snapshot) = ("vol".to_owned(), Some(Version { volume: "vol".into(), snapshot: "s".into() }));
    let of = Some(Version { volume: "vol".into(), snapshot: String::new() });
    let grant = GrantMessage { who: "uid:65534".into(), right: "admin".into(), from: Vec::new() };
    let acts = [
        Ask::CreateVolume(CreateVolume { name: "other".into(), ..CreateVolume::default() }),
        Ask::SetQuota(SetQuota { name: volume.clone(), quota_bytes: 1, quota_inodes: 1 }),
        Ask::SetRights(SetRights { name: volume.clone(), grant: Some(grant), trusted: None }),
        Ask::CheckVolume(CheckVolume { name: volume.clone(), repair: true, ..CheckVolume::default() }),
        Ask::EvictClient(EvictClient { volume: volume.clone(), session: 1 }),
        Ask::CreateSnapshot(CreateSnapshot { of: snapshot.clone(), ..CreateSnapshot::default() }),
        Ask::DeleteSnapshot(DeleteSnapshot { of: snapshot.clone() }),
        Ask::SignSnapshot(SignSnapshot { of: snapshot.clone(), ..SignSnapshot::default() }),
        Ask::Fork(Fork { of, name: "other".into(), as_stored: true }),
        Ask::Rollback(Rollback { to: snapshot, ..Rollback::default() }),
        Ask::Promote(Promote { fork: volume.clone(), ..Promote::default() }),
        Ask::DeleteVolume(DeleteVolume { name: volume, snapshots: false }),
    ];
    for act in acts {
        let said = format!("{act:?}");
        let failed = Client::connect(server.address).ask(act).unwrap_err();
        assert!(failed.message.contains("the audit log cannot be written"), "{said}: {}", failed.message);
    }
    match Client::connect(server.address).ask(Ask::ListVolumes(ListVolumes::default())) {
        Ok(Answer::Volumes(listed)) => {
            let [volume] = &listed.volumes[..] else { panic!("{listed:?}") };
            let quota = volume.status.as_ref().map(|status| status.quota_bytes);
            assert_eq!((volume.name.as_str(), quota), ("vol", Some(0)));
        }
        other => panic!("{other:?}"),
    }
    server.shutdown();
}

#[test]
fn a_server_does_not_listen_for_other_hosts_without_certificates() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(folder.path());
    config.listen = Some("0.0.0.0:0".parse().unwrap());
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let error = runtime.block_on(hayloft_volume::Server::start(config)).err().unwrap();
    assert!(matches!(error, hayloft_volume::ServerError::Open { .. }), "{error}");
}

/// What is wrong in what is asked of files of snapshots is refused, and nothing else.
#[test]
fn parts_of_files_that_are_not_there_are_refused() {
    let (_folder, server) = started();
    let mut client = Client::connect(server.address);
    let of = |snapshot: &str| Some(Version { volume: "vol".into(), snapshot: snapshot.into() });
    client.ask(Ask::CreateSnapshot(CreateSnapshot { of: of("s"), ..CreateSnapshot::default() })).unwrap();
    let cut = |of: Option<Version>, path: &str| {
        Ask::CutFile(CutFile { of, path: path.to_owned().into(), ..CutFile::default() })
    };
    let read = |path: &str, offsets: Vec<u64>, lengths: Vec<u32>| {
        let frames = vec![FrameOf { offsets, lengths }];
        Ask::ReadParts(ReadParts { of: of("s"), path: path.to_owned().into(), frames })
    };
    for (ask, code) in [
        (cut(of(""), "x"), FailureCode::Invalid),
        (cut(of("none"), "x"), FailureCode::NotFound),
        (cut(of("s"), "x"), FailureCode::Invalid),
        (cut(of("s"), ""), FailureCode::Invalid),
        (cut(of("s"), "../.."), FailureCode::Invalid),
        (read("x", vec![0], vec![1]), FailureCode::Invalid),
        (read("", vec![0, 1], vec![1]), FailureCode::Invalid),
        (read("", vec![0; 5000], vec![0; 5000]), FailureCode::Invalid),
        (read("", vec![0], vec![u32::MAX]), FailureCode::Invalid),
    ] {
        assert_eq!(refusal(&mut client, ask), code);
    }
    client.ask(Ask::ListVolumes(ListVolumes {})).unwrap();
}

#[test]
fn what_clients_say_for_people_does_nothing_to_a_terminal_and_takes_little_room() {
    let (_folder, running) = started();
    let escapes = "\u{1b}]0;owned\u{7}\u{1b}[2J\n";
    let said = Hello {
        host_name: format!("{escapes}{}", "n".repeat(20_000)),
        mount_point: format!("/mnt/{escapes}{}", "p".repeat(20_000)),
        release: escapes.to_owned(),
        ..hello(1)
    };
    let (_bad, _) = Client::open(running.address, said).unwrap();
    let mut admin = Client::connect(running.address);
    let Answer::Clients(found) = admin.ask(Ask::ListClients(ListClients { volume: "vol".into() })).unwrap()
    else {
        panic!("no clients");
    };
    let client = &found.clients[0];
    let words = [&client.host_name, &client.mount_point, &client.release];
    assert!(words.iter().all(|words| !words.contains(char::is_control)), "{words:?}");
    assert!(
        client.host_name.starts_with("?]0;owned??[2J?nnn") && client.mount_point.starts_with("/mnt/?]0;")
    );
    assert!(client.host_name.len() < 256 && client.mount_point.len() <= 4096);
    let long = Hello { token: vec![7; 1000].into(), ..hello(2) };
    assert!(Client::open(running.address, long).is_err());
    for note in [escapes.to_owned(), "n".repeat(5000)] {
        let of = Some(Version { volume: "vol".into(), snapshot: "s".into() });
        let made = CreateSnapshot { of, note, as_stored: true };
        assert_eq!(refusal(&mut admin, Ask::CreateSnapshot(made)), FailureCode::Invalid);
    }
    running.shutdown();
}
