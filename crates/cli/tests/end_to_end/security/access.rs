//! Nobody gets in: certificates between hosts, rights, and what a mount lets programs do. docs/security.md lists it.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tempfile::TempDir;

use crate::setup::farm::{Farm, HAYLOFT, by_clock, leave, run, run_failing, sh, wait_until};
use crate::setup::net::{Net, SERVER};

/// A server and a build host with certificates, a cable between them.
struct Hosts {
    net: Net,
    dir: TempDir,
    server: Option<Child>,
    /// How far the server's clock is off, where a test sets it.
    clock: Option<PathBuf>,
}

impl Hosts {
    fn new() -> Hosts {
        let dir = tempfile::Builder::new().prefix("hayloft-e2e-").tempdir_in("/var/tmp").unwrap();
        fs::create_dir(dir.path().join("mnt")).unwrap();
        Hosts { net: Net::new(1), dir, server: None, clock: None }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn address(&self) -> String {
        format!("{SERVER}:7440")
    }

    fn at(&self, host: &str, tls: &str, args: &[&str]) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/run/netns/{host}")).arg(HAYLOFT).arg("--cert").arg(self.path(tls));
        command.args(args).stdin(Stdio::null()).env("HAYLOFT_CONFIG", "/dev/null");
        command
    }

    /// `hayloft` on the server's host.
    fn here(&self, args: &[&str]) -> Command {
        self.at(&self.net.server(), "server-tls", args)
    }

    /// `hayloft` on the build host.
    fn there(&self, args: &[&str]) -> Command {
        self.at(&self.net.host(0), "client-tls", args)
    }

    /// `hayloft cert ...` on the server's host.
    fn cert(&self, args: &[&str]) -> Command {
        let mut command = self.here(&["cert"]);
        command.arg("--ca").arg(self.path("ca")).args(args);
        command
    }

    fn volume(&self, args: &[&str]) -> Command {
        let mut command = self.here(&["volume"]);
        command.args(args).args(["--server", &self.address()]);
        command
    }

    /// `cert issue | cert install`.
    fn bring(&self, name: &str, folder: &str) {
        let mut issue = self.cert(&["issue", name, "--again"]).stdout(Stdio::piped()).spawn().unwrap();
        let mut install = self.at(&self.net.host(0), folder, &["cert", "install"]);
        run(install.stdin(issue.stdout.take().unwrap()));
        assert!(issue.wait().unwrap().success());
    }

    fn serve(&self) -> Command {
        let mut serve = self.here(&["serve", "--listen", &self.address(), "--lease", "2", "--store"]);
        serve.arg(format!("file://{}", self.path("store").display()));
        serve.arg("--audit-log").arg(self.path("audit.log"));
        if let Some(clock) = &self.clock {
            by_clock(&mut serve, clock);
        }
        serve
    }

    /// Sets the server's clock.
    fn set_clock(&self, off: &str) {
        let clock = self.clock.as_ref().unwrap();
        fs::write(clock.with_extension("new"), off).unwrap();
        fs::rename(clock.with_extension("new"), clock).unwrap();
    }

    fn start(&mut self) {
        let log = fs::File::options().create(true).append(true).open(self.path("server.log")).unwrap();
        let mut server = self.serve().stdout(Stdio::piped()).stderr(log).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(server.stdout.take().unwrap()).read_line(&mut line).unwrap();
        self.server = Some(server);
        assert!(line.starts_with("serving "), "{line}");
    }

    fn kill(&mut self) {
        let mut server = self.server.take().unwrap();
        server.kill().unwrap();
        server.wait().unwrap();
    }

    fn mount(&self, options: &str) -> Command {
        let source = format!("{}/v", self.address());
        let mut command = self.there(&["mount", &source]);
        command.arg(self.path("mnt")).args(["-o", options]);
        command.arg("--log-dir").arg(self.path("log")).arg("--cache-dir").arg(self.path("cache"));
        command
    }

    fn log(&self) -> String {
        let logs = fs::read_dir(self.path("log")).into_iter().flatten();
        logs.map(|entry| fs::read_to_string(entry.unwrap().path()).unwrap()).collect()
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        if let Some(mut server) = self.server.take() {
            let _ = server.kill();
            let _ = server.wait();
        }
        let mnt = self.path("mnt");
        let _ = run_quietly(Command::new(HAYLOFT).args(["umount", "--force"]).arg(&mnt));
        let _ = run_quietly(Command::new("umount").arg("-l").arg(&mnt));
    }
}

fn run_quietly(command: &mut Command) -> std::io::Result<std::process::ExitStatus> {
    command.stdout(Stdio::null()).stderr(Stdio::null()).status()
}

#[test]
fn hosts_prove_who_they_are_and_come_back_after_a_restart() {
    let mut hosts = Hosts::new();
    let address = hosts.address();
    // Two commands mend it, and are named.
    let (code, said) = run_failing(&mut hosts.serve());
    assert!(code == 2 && said.contains("hayloft cert init") && said.contains("hayloft cert issue"), "{said}");
    run(&mut hosts.cert(&["init"]));
    hosts.bring("build1", "client-tls");
    hosts.start();
    run(&mut hosts.volume(&["create", "v", "--grant", "cert:build1=write"]));

    // Without a certificate, in the clear, and with one of another CA nobody gets in.
    let list = ["volume", "list", "--server", &address];
    let host = hosts.net.host(0);
    let (code, said) = run_failing(&mut hosts.at(&host, "none", &list));
    assert!(code == 6 && said.contains("hayloft cert install"), "{said}");
    let (code, _) = run_failing(hosts.there(&list).arg("--insecure"));
    assert_eq!(code, 3);
    let other = hosts.path("other-ca");
    run(hosts.at(&host, "other-tls", &["cert", "init", "--ca"]).arg(&other));
    let (code, said) = run_failing(&mut hosts.at(&host, "other-tls", &list));
    assert!(code == 6 && said.contains("CA"), "{said}");
    // What a certificate has no right to.
    for args in [
        &["volume", "delete", "v"][..],
        &["volume", "create", "w"],
        &["volume", "grant", "v", "cert:build1", "admin"],
    ] {
        let (code, said) = run_failing(hosts.there(args).args(["--server", &address]));
        assert!(code == 6 && said.contains("cert:build1"), "{said}");
    }

    run(&mut hosts.mount("commit=1"));
    let mnt = hosts.path("mnt");
    let data: Vec<u8> = (0..3_000_000_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    fs::write(mnt.join("large"), &data).unwrap();
    run(sh(&format!("cp -r /usr/share/doc/base-files '{0}/'; sync -f '{0}/large'", mnt.display())).arg("x"));
    run(hosts.there(&["sync"]).arg(&mnt));
    // Nothing is sent for what has not changed.
    let requests = || {
        let stats: serde_json::Value =
            serde_json::from_str(&run(hosts.there(&["stats", "--json"]).arg(&mnt))).unwrap();
        let all = crate::setup::farm::number(&stats, "server.requests.total");
        all - crate::setup::farm::number(&stats, "server.requests.PING")
    };
    let walk = || run(&mut sh(&format!("find '{0}' -ls; cat '{0}/large' | cksum", mnt.display())));
    let seen = walk();
    let before = requests();
    assert_eq!(walk(), seen);
    assert_eq!(requests(), before);
    hosts.kill();
    hosts.start();
    fs::write(mnt.join("after"), b"after").unwrap();
    run(hosts.there(&["sync", "--timeout", "60"]).arg(&mnt));
    leave(hosts.there(&["umount"]).arg(&mnt));
    run(&mut hosts.mount("ro"));
    assert_eq!(fs::read(mnt.join("large")).unwrap(), data);
    assert_eq!(fs::read(mnt.join("after")).unwrap(), b"after");
    leave(hosts.there(&["umount"]).arg(&mnt));
    // Who may only read does not mount for more.
    run(&mut hosts.volume(&["grant", "v", "cert:build1", "read"]));
    let (code, said) = run_failing(&mut hosts.mount("rw"));
    assert!(code == 6 && said.contains("-o ro"), "{said}");
    run(&mut hosts.mount("ro"));
    leave(hosts.there(&["umount"]).arg(&mnt));
    // Not from the network that they are on.
    run(&mut hosts.volume(&["grant", "v", "cert:build1", "write", "--from", "192.0.2.0/24"]));
    let (code, _) = run_failing(&mut hosts.mount("ro"));
    assert_eq!(code, 6);
}

#[test]
fn a_revoked_certificate_ends_a_mount_and_says_so() {
    let mut hosts = Hosts::new();
    run(&mut hosts.cert(&["init", "--host", SERVER]));
    hosts.bring("build1", "client-tls");
    let list = hosts.path("server-tls/crl.pem");
    let before = fs::read(&list).unwrap();
    hosts.start();
    run(&mut hosts.volume(&["create", "v", "--grant", "cert:*=write"]));
    run(&mut hosts.mount("commit=3600"));
    let mnt = hosts.path("mnt");
    fs::write(mnt.join("unsent"), b"not shipped").unwrap();
    run(&mut hosts.cert(&["revoke", "build1"]));
    assert!(run(&mut hosts.cert(&["list"])).contains("revoked"));
    wait_until("the mount says that it is over", Duration::from_secs(60), || {
        hosts.log().contains("does not accept this host's certificate: it was revoked")
    });
    // Nothing is lost without a word: what the server does not have is kept here, for the mount's user only.
    wait_until("what was not shipped is kept", Duration::from_secs(60), || {
        let kept = fs::read_dir(hosts.path("cache/unsent")).into_iter().flatten();
        kept.flatten().any(|kept| {
            let is_private = kept.metadata().unwrap().permissions().mode() & 0o777 == 0o700;
            is_private && fs::read(kept.path().join("files/unsent")).is_ok_and(|text| text == b"not shipped")
        })
    });
    let _ = run_quietly(Command::new("umount").arg("-l").arg(&mnt));
    let (code, said) = run_failing(&mut hosts.mount("rw"));
    assert!(code == 6 && said.contains("revoked"), "{said}");
    // Nor does it come in when something happens to the list; the server's log says what.
    let right = fs::read(&list).unwrap();
    for (times, broken) in
        [&b""[..], &b"no list"[..], &right[..right.len() / 2], &before[..]].into_iter().enumerate()
    {
        fs::write(&list, broken).unwrap();
        let (code, said) = run_failing(&mut hosts.mount("rw"));
        assert!(code == 6 && said.contains("revoked"), "{said}");
        let log = fs::read_to_string(hosts.path("server.log")).unwrap();
        assert!(log.matches("cannot be used: the old ones hold").count() > times, "{log}");
    }
    // Others are not disturbed, and a new one of that name comes in.
    hosts.bring("build1", "client-tls");
    run(&mut hosts.mount("rw"));
    leave(hosts.there(&["umount"]).arg(&mnt));
}

#[test]
fn a_server_whose_clock_is_years_off_ends_no_mount() {
    const TEN_YEARS: u64 = 10 * 365 * 86_400;
    let mut hosts = Hosts::new();
    hosts.clock = Some(hosts.path("clock"));
    hosts.set_clock("+0");
    run(&mut hosts.cert(&["init", "--host", SERVER]));
    hosts.bring("build1", "client-tls");
    hosts.start();
    run(&mut hosts.volume(&["create", "v", "--grant", "cert:*=write"]));
    run(&mut hosts.mount("commit=1"));
    let mnt = hosts.path("mnt");
    let says = |hosts: &Hosts| hosts.log().matches("one of the two clocks is wrong").count();
    // By its clock all certificates have expired, and then, after a restart, none is valid yet.
    for (off, file) in [(format!("+{TEN_YEARS}"), "after"), (format!("-{TEN_YEARS}"), "before")] {
        let said = says(&hosts);
        if file == "before" {
            hosts.kill();
        }
        hosts.set_clock(&off);
        if file == "before" {
            hosts.start();
        }
        wait_until("the mount says why it waits", Duration::from_secs(60), || says(&hosts) > said);
        let host = hosts.net.host(0);
        let list = ["volume", "list", "--server", &hosts.address()];
        let (code, said) = run_failing(&mut hosts.at(&host, "client-tls", &list));
        assert!(code == 6 && said.contains("clock"), "{said}");
        hosts.set_clock("+0");
        fs::write(mnt.join(file), file).unwrap();
        run(hosts.there(&["sync", "--timeout", "60"]).arg(&mnt));
    }
    leave(hosts.there(&["umount"]).arg(&mnt));
    run(&mut hosts.mount("ro"));
    for file in ["after", "before"] {
        assert_eq!(fs::read_to_string(mnt.join(file)).unwrap(), file);
    }
    leave(hosts.there(&["umount"]).arg(&mnt));
}

fn options_of(mount_point: &Path) -> String {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let is_it = |line: &&str| line.split(' ').nth(4) == mount_point.to_str();
    mounts.lines().find(is_it).unwrap().split(' ').nth(5).unwrap().to_owned()
}

#[test]
fn a_setuid_program_of_a_volume_is_none_unless_the_volume_is_trusted() {
    let farm = Farm::new();
    farm.create("v");
    let effective = |mount: &crate::setup::farm::Mount| {
        let program = mount.join("id");
        // By another program: one that a test starts meanwhile would have the file open for writing.
        run(&mut sh(&format!("cp /usr/bin/id '{0}'; chmod 4755 '{0}'", program.display())));
        let mut id = Command::new("setpriv");
        id.args(["--reuid", "65534", "--clear-groups"]).arg(&program).arg("-u");
        run(&mut id).trim().to_owned()
    };
    fs::set_permissions(farm.dir(), fs::Permissions::from_mode(0o755)).unwrap();
    let mount = farm.mount("v", "");
    let options = options_of(mount.path());
    assert!(options.contains("nosuid") && options.contains("nodev"), "{options}");
    assert_eq!(effective(&mount), "65534");
    mount.unmount();
    run(&mut farm.volume(["set-trusted", "v", "yes"]));
    let mount = farm.mount("v", "");
    let options = options_of(mount.path());
    assert!(!options.contains("nosuid") && !options.contains("nodev"), "{options}");
    assert_eq!(effective(&mount), "0");
    mount.unmount();
    // Who mounts has the last word.
    let mount = farm.mount("v", "nosuid,nodev");
    assert_eq!(effective(&mount), "65534");
    mount.unmount();
}

#[test]
fn nobody_else_reads_what_the_store_holds() {
    let (farm, mount) = Farm::mounted("v");
    fs::write(mount.join("secret"), vec![7; 200_000]).unwrap();
    mount.sync();
    let open =
        run(Command::new("find").arg(farm.dir().join("store")).args(["-perm", "/077", "!", "-type", "l"]));
    assert_eq!(open, "");
    mount.unmount();
}
