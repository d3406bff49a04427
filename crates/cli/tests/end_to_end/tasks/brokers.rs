//! Brokers that ask who comes, and brokers of which there are several.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use data_encoding::BASE64URL_NOPAD;
use nkeys::KeyPair;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::setup::agents::{Agent, Broker, free_port};
use crate::setup::farm::{Farm, Mount, hayloft, run, run_failing};

/// A volume, a mount for who submits, and agents on others.
struct Hosts {
    agents: Vec<Agent>,
    mounts: Vec<Mount>,
    _farm: Farm,
    flags: Vec<String>,
}

impl Hosts {
    fn new(count: usize, flags: &[String]) -> Hosts {
        let (farm, mounts) = Farm::shared(count + 1);
        let all: Vec<&str> =
            flags.iter().map(String::as_str).chain(["--slots", "2", "--allow-root"]).collect();
        let url = flags[1].clone();
        let agent = |at: usize| Agent::new(&url, &format!("h{at}"), mounts[at].path(), &all[2..]);
        let agents = (1..=count).map(agent).collect();
        Hosts { _farm: farm, mounts, agents, flags: flags.to_vec() }
    }

    fn task(&self, flags: &[String], script: &str) -> Command {
        let mut task = hayloft(["task", "--farm"]);
        task.args(flags).args(["--", "sh", "-c", script]).current_dir(self.mounts[0].path());
        task
    }

    fn run(&self, script: &str) -> String {
        run(&mut self.task(&self.flags, script))
    }
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

/// A CA, a certificate for the broker and one for hosts, each in a folder.
struct Certificates(TempDir);

impl Certificates {
    fn new() -> Certificates {
        let certificates = Certificates(tempfile::tempdir_in("/var/tmp").unwrap());
        run(certificates.cert("broker", &["cert", "init", "--host", "127.0.0.1"]).stdin(Stdio::null()));
        let mut issue =
            certificates.cert("host", &["cert", "issue", "build1"]).stdout(Stdio::piped()).spawn().unwrap();
        run(certificates.cert("host", &["cert", "install"]).stdin(issue.stdout.take().unwrap()));
        assert!(issue.wait().unwrap().success());
        certificates
    }

    fn cert(&self, folder: &str, args: &[&str]) -> Command {
        let mut command = hayloft(["--cert"]);
        command.arg(self.path(folder)).args(args);
        if args[1] != "install" {
            command.arg("--ca").arg(self.path("ca"));
        }
        command
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn file(&self, folder: &str, name: &str) -> String {
        self.path(folder).join(name).to_str().unwrap().to_owned()
    }
}

#[test]
fn a_broker_with_tls_takes_those_who_have_a_certificate() {
    let certificates = Certificates::new();
    let file = |name: &str| certificates.file("broker", name);
    let broker = Broker::with(&words(&[
        "--tlsverify",
        "--tlscert",
        &file("cert.pem"),
        "--tlskey",
        &file("key.pem"),
        "--tlscacert",
        &file("ca.pem"),
    ]));
    let url = format!("tls://127.0.0.1:{}", broker.port());
    let host = |name: &str| certificates.file("host", name);
    let with_ca = words(&["--broker", &url, "--broker-ca", &host("ca.pem")]);
    let own = ["--broker-certificate", &host("cert.pem"), "--broker-key", &host("key.pem")];
    let hosts = Hosts::new(1, &[with_ca.clone(), words(&own)].concat());
    assert_eq!(hosts.run("echo there"), "there\n");
    // Without a certificate, and to a broker whose own is not known, nobody comes.
    for flags in [with_ca, words(&["--broker", &url])] {
        let mut status = hayloft(["farm", "status"]);
        let (_, said) = run_failing(status.args(flags));
        assert!(said.contains("broker"), "{said}");
    }
}

#[test]
fn a_broker_with_a_password_takes_those_who_know_it() {
    let broker = Broker::with(&words(&["--user", "builds", "--pass", "secret-1"]));
    let url = |who: &str| format!("nats://{who}127.0.0.1:{}", broker.port());
    let hosts = Hosts::new(1, &words(&["--broker", &url("builds:secret-1@")]));
    assert_eq!(hosts.run("echo there"), "there\n");
    for who in ["", "builds:wrong@"] {
        let (_, said) = run_failing(&mut hayloft(["farm", "status", "--broker", &url(who)]));
        assert!(said.contains("cannot be reached"), "{said}");
    }
    // The process that submits has it where others cannot read it.
    let arguments =
        |entry: std::fs::DirEntry| std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
    let relays = std::fs::read_dir(Path::new("/proc")).unwrap().flatten().map(arguments);
    let relays: Vec<_> = relays.filter(|line| line.ends_with(b"farm-relay\0")).collect();
    assert!(
        !relays.is_empty() && relays.iter().all(|line| !String::from_utf8_lossy(line).contains("secret-1"))
    );
}

/// A token of NATS: claims that are signed by who has issued them.
fn token(issuer: &KeyPair, subject: &KeyPair, name: &str, nats: Value) -> String {
    let claims = json!({ "jti": name, "iat": 1_700_000_000, "iss": issuer.public_key(), "sub": subject.public_key(), "name": name, "nats": nats });
    let part = |value: Value| BASE64URL_NOPAD.encode(value.to_string().as_bytes());
    let signed = format!("{}.{}", part(json!({ "typ": "JWT", "alg": "ed25519-nkey" })), part(claims));
    format!("{signed}.{}", BASE64URL_NOPAD.encode(&issuer.sign(signed.as_bytes()).unwrap()))
}

/// Writes a file for a test; its path.
fn written(dir: &TempDir, name: &str, text: &str) -> String {
    let path = dir.path().join(name);
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Tasks run with these credentials; without any, and with others, nobody gets in.
fn only_with(broker: &Broker, credentials: &str, others: &str) {
    let with = |file: &str| words(&["--broker", &broker.url(), "--broker-credentials", file]);
    let hosts = Hosts::new(1, &with(credentials));
    assert_eq!(hosts.run("echo there"), "there\n");
    // By its command line alone as well.
    assert_eq!(hosts.run("echo there"), "there\n");
    for flags in [with(others), words(&["--broker", &broker.url()])] {
        let (_, said) = run_failing(hayloft(["farm", "status"]).args(flags));
        assert!(said.contains("cannot be reached"), "{said}");
    }
}

#[test]
fn a_broker_of_an_operator_takes_those_whose_account_is_his() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let unlimited = json!({ "subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "wildcards": true, "conn": -1, "leaf": -1 });
    let credentials = |name: &str, account: &KeyPair| {
        let user = KeyPair::new_user();
        let may = json!({ "pub": {}, "sub": {}, "subs": -1, "data": -1, "payload": -1, "type": "user", "version": 2 });
        let text = format!(
            "-----BEGIN NATS USER JWT-----\n{}\n------END NATS USER JWT------\n\n-----BEGIN USER NKEY SEED-----\n{}\n------END USER NKEY SEED------\n",
            token(account, &user, name, may),
            user.seed().unwrap()
        );
        written(&dir, name, &text)
    };
    let (operator, account) = (KeyPair::new_operator(), KeyPair::new_account());
    let of_operator = token(&operator, &operator, "operator", json!({ "type": "operator", "version": 2 }));
    let of_account = json!({ "limits": unlimited, "type": "account", "version": 2 });
    let of_account = token(&operator, &account, "builds", of_account);
    let public = account.public_key();
    let config = format!(
        "operator: {of_operator}\nresolver: MEMORY\nresolver_preload: {{ {public}: {of_account} }}\n"
    );
    let broker = Broker::with(&words(&["-c", &written(&dir, "config", &config)]));
    only_with(&broker, &credentials("ours", &account), &credentials("theirs", &KeyPair::new_account()));
}

#[test]
fn a_broker_that_knows_keys_takes_those_who_have_one() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let (ours, theirs) = (KeyPair::new_user(), KeyPair::new_user());
    let config = format!("authorization: {{ users: [ {{ nkey: {} }} ] }}\n", ours.public_key());
    let broker = Broker::with(&words(&["-c", &written(&dir, "config", &config)]));
    let key =
        |name: &str, pair: &KeyPair| written(&dir, name, &format!("# {name}\n{}\n", pair.seed().unwrap()));
    only_with(&broker, &key("ours", &ours), &key("theirs", &theirs));
}

#[test]
fn of_a_cluster_of_three_brokers_any_one_may_be_killed() {
    let ports: Vec<u16> = (0..3).map(|_| free_port()).collect();
    let routes: Vec<String> = ports.iter().map(|port| format!("nats://127.0.0.1:{port}")).collect();
    let routes = routes.join(",");
    let of_cluster = |port: &u16| {
        let listen = format!("nats://127.0.0.1:{port}");
        Broker::with(&words(&["--cluster", &listen, "--cluster_name", "test", "--routes", &routes]))
    };
    let mut brokers: Vec<Broker> = ports.iter().map(of_cluster).collect();
    let urls: Vec<String> = brokers.iter().map(Broker::url).collect();
    let hosts = Hosts::new(2, &words(&["--broker", &urls.join(",")]));
    assert_eq!(hosts.run("echo there"), "there\n");
    for (round, broker) in brokers.iter_mut().enumerate() {
        let script = |at: usize| {
            format!("echo run >> log{round}-{at}; sleep 2; echo done >> log{round}-{at}; echo {at}")
        };
        let tasks: Vec<_> = (0..3)
            .map(|at| hosts.task(&hosts.flags, &script(at)).stdout(Stdio::piped()).spawn().unwrap())
            .collect();
        std::thread::sleep(std::time::Duration::from_millis(700));
        broker.kill();
        for (at, task) in tasks.into_iter().enumerate() {
            let output = task.wait_with_output().unwrap();
            assert!(output.status.success(), "{round} {output:?}");
            assert_eq!(output.stdout, format!("{at}\n").as_bytes());
            // What ran when it was killed goes on: the others of the cluster are there within the lease.
            let log =
                std::fs::read_to_string(hosts.mounts[0].path().join(format!("log{round}-{at}"))).unwrap();
            assert_eq!(log, "run\ndone\n");
        }
        broker.start();
    }
    drop(hosts.agents);
}
