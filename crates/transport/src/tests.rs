//! Two ends with certificates of the small CA, over real sockets.

use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use tokio::net::TcpListener;

use crate::authority::{Authority, AuthorityError};
use crate::client::secure;
use crate::{
    Acceptor, Bundle, ConnectError, Credentials, CredentialsError, Dial, Identity, Peer, Refusal, Security,
};

/// A CA, a server's folder and a client's.
struct Two {
    folder: tempfile::TempDir,
    authority: Authority,
}

fn hosts() -> Vec<String> {
    vec!["farm1".to_owned(), "127.0.0.1".to_owned()]
}

impl Two {
    fn new() -> Two {
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::init(&folder.path().join("ca")).unwrap();
        let mut two = Two { folder, authority };
        two.issue("farm1", &hosts(), 1).install(&two.server(), None).unwrap();
        two.issue("build1", &[], 1).install(&two.client(), None).unwrap();
        two
    }

    fn issue(&mut self, name: &str, hosts: &[String], days: u32) -> Bundle {
        self.authority.issue(name, hosts, days, true).unwrap()
    }

    fn server(&self) -> PathBuf {
        self.folder.path().join("server")
    }

    fn client(&self) -> PathBuf {
        self.folder.path().join("client")
    }

    fn acceptor(&self) -> Arc<Acceptor> {
        Arc::new(Acceptor::new(Security::Tls(self.server())).unwrap())
    }
}

/// What both ends see of an attempt to send `bytes` there and back.
fn echo(acceptor: &Arc<Acceptor>, client: &Path, host: &str, bytes: usize) -> (Result<Peer, String>, Client) {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
    let address = listener.local_addr().unwrap();
    let acceptor = Arc::clone(acceptor);
    let serving = runtime.spawn(async move {
        let (socket, peer) = listener.accept().await.unwrap();
        let (mut incoming, mut outgoing, peer) =
            acceptor.accept_foreign(socket, peer).await.map_err(|error| error.to_string())?;
        let mut buffer = BytesMut::new();
        while buffer.len() < bytes && incoming.read_buf(&mut buffer).await.is_ok_and(|count| count > 0) {}
        let mut rest = &buffer[..];
        while !rest.is_empty() {
            let written = outgoing.write(rest).await.map_err(|error| error.to_string())?;
            rest = &rest[written..];
        }
        outgoing.flush().await.map_err(|error| error.to_string())?;
        Ok(peer)
    });
    let said = talk(TcpStream::connect(address).unwrap(), client, host, bytes);
    (runtime.block_on(serving).unwrap(), said)
}

type Client = Result<Vec<u8>, ConnectError>;

fn talk(socket: TcpStream, folder: &Path, host: &str, bytes: usize) -> Client {
    let (mut sending, mut receiving) = secure(socket, host, folder)?;
    receiving.socket().set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let data: Vec<u8> = (0..bytes).map(|at| (at * 7 % 251) as u8).collect();
    // The other end takes all of it before it answers.
    let _ = sending.write_all(&data);
    let mut back = Vec::new();
    let mut part = [0; 10_000];
    while back.len() < bytes {
        match receiving.read(&mut part) {
            Ok(0) => break,
            Ok(count) => back.extend(&part[..count]),
            Err(error) => {
                return Err(match crate::refusal(&error) {
                    Some(refusal) => ConnectError::Refused(refusal),
                    None => ConnectError::Unreachable(error),
                });
            }
        }
    }
    assert_eq!(back, data);
    Ok(back)
}

fn dial(folder: &Path) -> Dial {
    Dial { credentials: folder.to_owned(), insecure: false }
}

fn own_refusal(said: Client) -> String {
    match said {
        Err(error @ ConnectError::Refused(Refusal::Own(_))) => {
            assert!(error.is_final());
            error.to_string()
        }
        other => panic!("{other:?}"),
    }
}

fn server_refusal(said: Client) -> String {
    match said {
        Err(error @ ConnectError::Refused(Refusal::Server(_))) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn both_ends_are_known_by_name_and_data_comes_back() {
    let two = Two::new();
    let acceptor = two.acceptor();
    for (host, bytes) in [("farm1", 1), ("127.0.0.1", 3_000_000)] {
        let (peer, said) = echo(&acceptor, &two.client(), host, bytes);
        let peer = peer.unwrap();
        assert_eq!(peer.identity, Identity::Certificate("build1".to_owned()));
        acceptor.check(&peer).unwrap();
        said.unwrap();
    }
}

#[test]
fn a_revoked_certificate_ends_what_there_is_and_does_not_come_back() {
    let mut two = Two::new();
    let acceptor = two.acceptor();
    let (peer, _) = echo(&acceptor, &two.client(), "farm1", 5);
    let peer = peer.unwrap();
    two.issue("build2", &[], 1).install(&two.folder.path().join("other"), None).unwrap();
    let revoked = two.authority.revoke("build1").unwrap();
    assert!(revoked.len() == 1 && !revoked[0].is_valid());
    // Without a restart of the server.
    assert!(two.authority.tell_revoked(&two.server()).unwrap());
    acceptor.refresh();
    assert!(acceptor.check(&peer).unwrap_err().contains("revoked"));
    let (peer, said) = echo(&acceptor, &two.client(), "farm1", 5);
    peer.unwrap_err();
    assert!(own_refusal(said).contains("was revoked"));
    // Others come in as before.
    echo(&acceptor, &two.folder.path().join("other"), "farm1", 5).0.unwrap();
    // A new one of the same name comes in.
    two.issue("build1", &[], 1).install(&two.client(), None).unwrap();
    echo(&acceptor, &two.client(), "farm1", 5).0.unwrap();
}

#[test]
fn certificates_that_have_expired_or_are_of_another_authority_are_refused() {
    let mut two = Two::new();
    let acceptor = two.acceptor();
    two.issue("build1", &[], 0).install(&two.client(), None).unwrap();
    // Valid up to this second.
    std::thread::sleep(Duration::from_millis(1100));
    let (peer, said) = echo(&acceptor, &two.client(), "farm1", 5);
    peer.unwrap_err();
    let said = said.map_err(|error| dial(&two.client()).by_own_clock(error));
    assert!(
        matches!(&said, Err(error) if error.is_final() && error.to_string().contains("has expired")),
        "{said:?}"
    );
    assert!(!two.authority.issued().last().unwrap().is_valid());
    // One that is valid here is no reason to give up: the clocks differ.
    two.issue("build1", &[], 1).install(&two.client(), None).unwrap();
    let said = said.map_err(|error| dial(&two.client()).by_own_clock(error));
    assert!(
        matches!(&said, Err(error) if !error.is_final() && error.to_string().contains("clocks is wrong")),
        "{said:?}"
    );
    // One that expires ends the connection that there is.
    let mut peer = echo(&acceptor, &two.client(), "farm1", 5).0.unwrap();
    acceptor.check(&peer).unwrap();
    peer.shown.as_mut().unwrap().expires = 1;
    assert!(acceptor.check(&peer).unwrap_err().contains("expired"));

    let mut stranger = Authority::init(&two.folder.path().join("other-ca")).unwrap();
    let mut bundle = stranger.issue("build1", &[], 1, false).unwrap();
    bundle.install(&two.client(), None).unwrap();
    let (peer, said) = echo(&acceptor, &two.client(), "farm1", 5);
    peer.unwrap_err();
    assert!(server_refusal(said).contains("CA that this host does not know"));
    // It believes the server, but not the other way round.
    bundle.authorities = two.issue("x", &[], 1).authorities;
    bundle.install(&two.client(), None).unwrap();
    let (peer, said) = echo(&acceptor, &two.client(), "farm1", 5);
    peer.unwrap_err();
    assert!(own_refusal(said).contains("CA that the server does not know"));
}

#[test]
fn a_server_is_believed_under_its_own_names_only() {
    let mut two = Two::new();
    let acceptor = two.acceptor();
    let said = echo(&acceptor, &two.client(), "farm2", 5).1;
    assert!(server_refusal(said).contains("other names"));
    // A build host that listens where the server did.
    two.issue("build2", &[], 1).install(&two.server(), None).unwrap();
    let said = echo(&two.acceptor(), &two.client(), "farm1", 5).1;
    server_refusal(said);
}

#[test]
fn a_list_that_is_lost_lets_nobody_in_again() {
    let mut two = Two::new();
    let list = two.server().join("crl.pem");
    std::fs::copy(&list, two.folder.path().join("before.pem")).unwrap();
    let acceptor = two.acceptor();
    two.authority.revoke("build1").unwrap();
    assert!(two.authority.tell_revoked(&two.server()).unwrap());
    let right = std::fs::read(&list).unwrap();
    let other = Authority::init(&two.folder.path().join("other-ca")).unwrap();
    drop(other);
    let of_another = std::fs::read(two.folder.path().join("other-ca/crl.pem")).unwrap();
    // When the server began, nobody was revoked.
    let of_before = std::fs::read(two.folder.path().join("before.pem")).unwrap();
    let refuses = |what: &str| {
        acceptor.refresh();
        let (peer, said) = echo(&acceptor, &two.client(), "farm1", 5);
        assert!(peer.is_err(), "{what}");
        assert!(own_refusal(said).contains("was revoked"), "{what}");
    };
    refuses("as it is");
    for (what, content) in
        [("emptied", &b""[..]), ("another CA's", &of_another), ("cut", &right[..right.len() / 2])]
    {
        std::fs::write(&list, content).unwrap();
        refuses(what);
        // A server that starts says what is wrong.
        let error = Acceptor::new(Security::Tls(two.server())).err().expect(what);
        assert!(matches!(error, CredentialsError::Invalid { .. }), "{what}: {error}");
    }
    std::fs::write(&list, of_before).unwrap();
    refuses("an older one of this CA");
    std::fs::remove_file(&list).unwrap();
    refuses("gone");
    std::os::unix::fs::symlink("nowhere", &list).unwrap();
    refuses("a link that leads nowhere");
    assert!(Acceptor::new(Security::Tls(two.server())).is_err(), "a server that starts takes it for no list");
    std::fs::remove_file(&list).unwrap();
    std::fs::write(&list, right).unwrap();
    refuses("there again");
}

#[test]
fn a_build_hosts_certificate_is_none_of_a_server() {
    let two = Two::new();
    let loaded = |folder: PathBuf| Credentials::load(&folder).unwrap().check_server(&folder);
    loaded(two.server()).unwrap();
    let error = loaded(two.client()).unwrap_err().to_string();
    assert!(error.contains("none of a server") && error.contains("cert.pem"), "{error}");
}

#[test]
fn files_are_for_their_owner_only() {
    let two = Two::new();
    for name in ["ca", "server", "client"] {
        let folder = two.folder.path().join(name);
        assert_eq!(folder.metadata().unwrap().permissions().mode() & 0o777, 0o700, "{name}");
        for entry in folder.read_dir().unwrap().map(|entry| entry.unwrap()) {
            let mode = entry.metadata().unwrap().permissions().mode() & 0o777;
            assert_eq!(mode, 0o600, "{}", entry.path().display());
        }
    }
    let key = two.client().join("key.pem");
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o644)).unwrap();
    assert!(matches!(Credentials::load(&two.client()), Err(CredentialsError::Open { path }) if path == key));
}

#[test]
fn bundles_survive_being_carried_as_text() {
    let mut two = Two::new();
    let bundle = two.issue("build3", &[], 1);
    let carried = Bundle::parse(&format!("said by a shell\n{}", bundle.to_text())).unwrap();
    carried.install(&two.folder.path().join("carried"), None).unwrap();
    echo(&two.acceptor(), &two.folder.path().join("carried"), "farm1", 5).0.unwrap();
    assert_eq!(Bundle::parse("-----BEGIN CERTIFICATE-----"), None);
    assert_eq!(Bundle::parse(""), None);
}

#[test]
fn the_authority_keeps_its_book() {
    let mut two = Two::new();
    let ca = two.folder.path().join("ca");
    assert!(matches!(Authority::init(&ca), Err(AuthorityError::Exists(_))));
    let issued = |result: Result<Bundle, AuthorityError>| result.map(|_| ());
    assert!(matches!(
        issued(two.authority.issue("build1", &[], 1, false)),
        Err(AuthorityError::Issued(name)) if name == "build1"
    ));
    for wrong in ["", "a/b", "*", "-x", "..", "a b"] {
        let made = issued(two.authority.issue(wrong, &[], 1, false));
        assert!(matches!(made, Err(AuthorityError::Name(_))), "{wrong}");
    }
    assert!(matches!(two.authority.revoke("nobody"), Err(AuthorityError::Unknown(_))));
    drop(two.authority);
    let names: Vec<String> =
        Authority::open(&ca).unwrap().issued().iter().map(|issued| issued.name.clone()).collect();
    assert_eq!(names, ["farm1", "build1"]);
    assert!(matches!(Authority::open(Path::new("/nowhere")), Err(AuthorityError::Missing(_))));
}
