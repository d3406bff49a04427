//! What a command in a root tries in vain: to leave it, to see others, to mount, to stay.
//!
//! The attempts are system calls: this test program itself runs in the root, with the test `inside` as its only one.

use std::ffi::CString;
use std::fs;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use crate::setup::farm::{copy_program, run, run_failing, wait_until};
use crate::setup::root_box::RootBox;

/// Runs the attempts that `inside` knows under this name, in a root.
fn attempt<const N: usize>(roots: &RootBox, name: &str, flags: [&str; N], env: &str) -> String {
    let program = format!("{}:/attempt", std::env::current_exe().unwrap().display());
    let mut command = roots.hayloft(["run", "--bind", &program]);
    command.args(flags).args(["--env", &format!("ATTEMPT={name}"), "--env", env]);
    command.args(["--", "/attempt", "--exact", "roots::isolation::inside", "--ignored", "--nocapture"]);
    run(&mut command)
}

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap()
}

/// The error of a system call.
fn call(number: libc::c_long, args: [usize; 5]) -> i32 {
    let [a, b, c, d, e] = args;
    // SAFETY: the arguments are numbers or pointers to strings that live until the call returns.
    match unsafe { libc::syscall(number, a, b, c, d, e) } {
        -1 => errno(),
        _ => 0,
    }
}

#[test]
#[ignore = "runs inside a root, started by the other tests here"]
fn inside() {
    match std::env::var("ATTEMPT").unwrap_or_default().as_str() {
        "mounts" => mounts(),
        "kernel" => kernel(),
        "leave" => leave(),
        "others" => others(),
        "network" => network(),
        "processes" => processes(),
        other => panic!("no attempt '{other}'"),
    }
}

fn mounts() {
    let (kind, tmp, root) = (c"tmpfs".as_ptr() as usize, c"/tmp".as_ptr() as usize, c"/".as_ptr() as usize);
    assert_eq!(call(libc::SYS_mount, [kind, tmp, kind, 0, 0]), libc::EPERM);
    assert_eq!(
        call(libc::SYS_mount, [0, root, 0, (libc::MS_REMOUNT | libc::MS_BIND) as usize, 0]),
        libc::EPERM
    );
    assert_eq!(call(libc::SYS_umount2, [c"/proc".as_ptr() as usize, 2, 0, 0, 0]), libc::EPERM);
    assert_eq!(call(libc::SYS_pivot_root, [tmp, tmp, 0, 0, 0]), libc::EPERM);
    assert_eq!(call(libc::SYS_fsopen, [kind, 0, 0, 0, 0]), libc::EPERM);
    assert_eq!(call(libc::SYS_open_tree, [libc::AT_FDCWD as usize, root, 1, 0, 0]), libc::EPERM);
    // The calls of newer kernels that do the same: open_tree_attr, listns, and unshare of an empty mount namespace.
    assert_eq!(call(467, [libc::AT_FDCWD as usize, root, 1, 0, 0]), libc::EPERM);
    assert_eq!(call(470, [0; 5]), libc::ENOSYS);
    assert_eq!(call(libc::SYS_unshare, [0x0010_0000, 0, 0, 0, 0]), libc::EPERM);
    assert_eq!(call(libc::SYS_unshare, [libc::CLONE_FS as usize, 0, 0, 0, 0]), 0);
    for flag in [libc::CLONE_NEWUSER, libc::CLONE_NEWNS, libc::CLONE_NEWPID, libc::CLONE_NEWNET] {
        assert_eq!(call(libc::SYS_unshare, [flag as usize, 0, 0, 0, 0]), libc::EPERM, "{flag:x}");
    }
    assert_eq!(call(libc::SYS_clone3, [0, 0, 0, 0, 0]), libc::ENOSYS);
    use std::os::fd::AsRawFd;
    let own = fs::File::open("/proc/self/ns/mnt").unwrap();
    assert_eq!(call(libc::SYS_setns, [own.as_raw_fd() as usize, 0, 0, 0, 0]), libc::EPERM);
}

fn kernel() {
    for path in [
        "/proc/sys/kernel/core_pattern",
        "/proc/sysrq-trigger",
        "/proc/sys/vm/drop_caches",
        "/sys/kernel/profiling",
    ] {
        let Err(error) = fs::OpenOptions::new().write(true).open(path) else {
            panic!("{path} can be written")
        };
        assert!(
            matches!(error.raw_os_error(), Some(libc::EROFS | libc::ENOENT | libc::EACCES)),
            "{path}: {error}"
        );
    }
    assert_eq!(fs::read("/proc/timer_list").unwrap_or_default(), b"");
    assert_eq!(call(libc::SYS_swapoff, [c"/dev/loop0".as_ptr() as usize, 0, 0, 0, 0]), libc::EPERM);
    assert_eq!(call(libc::SYS_bpf, [0; 5]), libc::EPERM);
    assert_eq!(call(libc::SYS_keyctl, [0; 5]), libc::EPERM);
    assert_eq!(call(libc::SYS_init_module, [0; 5]), libc::EPERM);
    assert_eq!(call(libc::SYS_open_by_handle_at, [0; 5]), libc::EPERM);
    assert_eq!(call(libc::SYS_reboot, [0; 5]), libc::EPERM);
    assert_eq!(call(libc::SYS_sethostname, [c"x".as_ptr() as usize, 1, 0, 0, 0]), libc::EPERM);
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let figure =
        |key: &str| status.lines().find_map(|line| line.strip_prefix(key)).unwrap().trim().to_owned();
    assert_eq!((figure("NoNewPrivs:"), figure("Seccomp:")), ("1".to_owned(), "2".to_owned()));
    let held = u64::from_str_radix(&figure("CapEff:"), 16).unwrap();
    // SYS_ADMIN, SYS_MODULE, SYS_RAWIO, SYS_PTRACE, NET_ADMIN, DAC_READ_SEARCH.
    for capability in [21, 16, 17, 19, 12, 2] {
        assert_eq!(held & (1 << capability), 0, "{capability}");
    }
    // What installing packages takes works: owners, devices (which open nowhere).
    fs::write("/owned", "").unwrap();
    std::os::unix::fs::chown("/owned", Some(77), Some(88)).unwrap();
    assert_eq!(fs::metadata("/owned").unwrap().uid(), 77);
    for folder in ["/", "/tmp", "/run", "/dev/shm"] {
        let path = Path::new(folder).join("disk");
        let name = CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: the string lives until the call returns.
        assert_eq!(
            unsafe { libc::mknod(name.as_ptr(), libc::S_IFCHR | 0o600, libc::makedev(1, 5)) },
            0,
            "{folder}"
        );
        assert_eq!(fs::File::open(&path).unwrap_err().raw_os_error(), Some(libc::EACCES), "{folder}");
    }
    // SAFETY: as above.
    assert_eq!(unsafe { libc::mknod(c"/dev/disk".as_ptr(), libc::S_IFCHR | 0o600, libc::makedev(1, 5)) }, -1);
    assert_eq!(errno(), libc::EROFS);
    fs::OpenOptions::new().write(true).open("/dev/null").unwrap().write_all(b"x").unwrap();
}

fn leave() {
    let inode = |path: &str| fs::metadata(path).map(|meta| (meta.dev(), meta.ino())).unwrap();
    let before = inode("/");
    // The classic way out of chroot: a folder open above the new root.
    fs::create_dir("/jail").unwrap();
    let top = fs::File::open("/").unwrap();
    use std::os::fd::AsRawFd;
    // SAFETY: strings and descriptors live until the calls return.
    unsafe {
        assert_eq!(libc::chroot(c"/jail".as_ptr()), 0);
        assert_eq!(libc::fchdir(top.as_raw_fd()), 0);
        for _ in 0..100 {
            assert_eq!(libc::chdir(c"..".as_ptr()), 0);
        }
        assert_eq!(libc::chroot(c".".as_ptr()), 0);
    }
    assert_eq!(inode("/"), before);
    assert_eq!(inode("/.."), before);
    // The first process has more to see, and shows it to nobody.
    for name in ["root", "cwd", "exe", "environ", "mem", "fd/3", "ns/mnt", "map_files"] {
        let path = Path::new("/proc/1").join(name);
        // Of a folder that cannot be read the second try says that it is one.
        let Err(error) = fs::read_dir(&path)
            .and_then(|mut entries| entries.next().transpose())
            .map(drop)
            .or_else(|_| fs::read(&path).map(drop))
        else {
            panic!("{} can be read", path.display())
        };
        assert!(
            matches!(error.raw_os_error(), Some(libc::EACCES | libc::EPERM | libc::EISDIR)),
            "{name}: {error}"
        );
    }
    // SAFETY: plain numbers.
    unsafe {
        assert_eq!(libc::ptrace(libc::PTRACE_ATTACH, 1, 0, 0), -1);
        assert_eq!(
            libc::kill(1, libc::SIGKILL),
            0,
            "a signal to the first process is taken and does nothing"
        );
        assert_eq!(libc::kill(1, libc::SIGSTOP), 0);
    }
}

fn others() {
    let numbers = fs::read_dir("/proc").unwrap().flatten();
    let pids: Vec<String> = numbers
        .map(|entry| entry.file_name().into_string().unwrap())
        .filter(|name| name.parse::<u32>().is_ok())
        .collect();
    assert_eq!(pids.len(), 2, "the first process and this one: {pids:?}");
    let state = std::env::var("STATE").unwrap();
    assert_eq!(fs::read_dir(&state).map(Iterator::count).unwrap_or(0), 0, "{state} shows other roots");
    assert!(!Path::new("/run/hayloft").exists());
    assert_eq!(fs::read_dir("/sys/fs/cgroup").map(Iterator::count).unwrap_or(0), 0);
    // SAFETY: plain numbers. A segment that the test outside has made.
    assert_eq!(unsafe { libc::shmget(0x4a79_0001, 0, 0) }, -1);
    assert_eq!(errno(), libc::ENOENT);
}

fn network() {
    let address = std::env::var("ADDRESS").unwrap();
    println!("reached: {}", TcpStream::connect(&address).is_ok());
    // No network namespace bounds these.
    for family in [libc::AF_VSOCK, libc::AF_ALG] {
        let error = call(libc::SYS_socket, [family as usize, libc::SOCK_STREAM as usize, 0, 0, 0]);
        assert_eq!(error, libc::EAFNOSUPPORT, "{family}");
    }
    let own = TcpListener::bind("127.0.0.1:0").unwrap();
    TcpStream::connect(own.local_addr().unwrap()).expect("a loopback interface that is up");
}

/// Makes processes that wait until there can be no more, and says how many there were.
fn processes() {
    let mut made = Vec::new();
    let error = loop {
        // SAFETY: the child calls nothing but pause(2), until it is killed.
        match unsafe { libc::fork() } {
            -1 => break errno(),
            0 => loop {
                // SAFETY: takes nothing.
                unsafe { libc::pause() };
            },
            child => made.push(child),
        }
        assert!(made.len() < 2000, "nothing bounds them");
    };
    println!("made: {} error: {error}", made.len());
    for child in made {
        // SAFETY: plain numbers; they are children of this process.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, std::ptr::null_mut(), 0);
        }
    }
}

/// How many processes that attempt says to have made.
pub(crate) fn made(said: &str) -> usize {
    let line = said.lines().find_map(|line| line.split_once("made: ")).unwrap_or_else(|| panic!("{said}")).1;
    let (number, error) = line.split_once(" error: ").unwrap();
    assert_eq!(error, libc::EAGAIN.to_string());
    number.parse().unwrap()
}

#[test]
fn a_root_has_so_many_processes_and_no_more() {
    let roots = RootBox::new();
    let report = roots.dir().join("report.json");
    let flags = ["--processes", "40", "--json", report.to_str().unwrap()];
    // The first process, this one's threads.
    let made = made(&attempt(&roots, "processes", flags, "X="));
    assert!((20..=38).contains(&made), "{made}");
    let report: serde_json::Value = serde_json::from_slice(&fs::read(report).unwrap()).unwrap();
    assert_eq!((&report["exit_code"], &report["processes_refused"]), (&0.into(), &1.into()), "{report}");
    // It says what was reached, and how to have more of it; the host has what it needs meanwhile.
    let script = "for i in 1 2 3 4 5 6 7 8 9 10; do sleep 4720.1 & done; exec sleep 4720.2";
    let (code, said) = run_failing(&mut roots.run(["--processes", "8"], script));
    assert!(code != 125 && said.contains("all the 8 processes and threads"), "{code}: {said}");
    assert!(said.contains("--processes allows more"), "{said}");
    // Nobody need ask for a bound.
    let other = roots.start(["--name", "other"], "sleep 4720.3");
    let bound = roots.show("other")["processes"].as_u64().unwrap();
    assert!((8..=16384).contains(&bound), "{bound}");
    let groups = roots.groups();
    let max = groups.iter().find_map(|group| fs::read_to_string(group.join("pids.max")).ok()).unwrap();
    assert_eq!(max.trim(), bound.to_string());
    drop(other);
    for wrong in ["7", "0", "9999999"] {
        let (code, said) = run_failing(&mut roots.run(["--processes", wrong], "true"));
        assert!(code == 125 && said.contains("from 8 to"), "{wrong}: {code}: {said}");
    }
}

#[test]
fn nothing_is_mounted_and_no_namespace_is_made() {
    attempt(&RootBox::new(), "mounts", [], "X=");
}

#[test]
fn the_kernel_and_its_settings_are_out_of_reach() {
    attempt(&RootBox::new(), "kernel", [], "X=");
}

#[test]
fn there_is_no_way_out_of_the_root() {
    attempt(&RootBox::new(), "leave", [], "X=");
}

#[test]
fn other_roots_and_the_host_are_not_seen() {
    let roots = RootBox::new();
    let other = roots.start(["--name", "other"], "echo secret >/secret; sleep 4719.1");
    // SAFETY: plain numbers; removed below.
    let segment = unsafe { libc::shmget(0x4a79_0001, 4096, libc::IPC_CREAT | 0o600) };
    attempt(&roots, "others", [], &format!("STATE={}", roots.state().display()));
    // SAFETY: as above.
    unsafe { libc::shmctl(segment, libc::IPC_RMID, std::ptr::null_mut()) };
    drop(other);
}

#[test]
fn the_network_is_the_hosts_only_when_asked() {
    let roots = RootBox::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("ADDRESS={}", listener.local_addr().unwrap());
    assert!(attempt(&roots, "network", [], &address).contains("reached: false"));
    assert!(attempt(&roots, "network", ["--network", "host"], &address).contains("reached: true"));
}

#[test]
fn setuid_programs_give_rights_only_when_asked() {
    let roots = RootBox::new();
    let script = "cp /usr/bin/id /home/id; chmod 4755 /home/id; exec setpriv --reuid 1234 --regid 1234 --clear-groups /home/id -u";
    assert_eq!(run(&mut roots.run([], script)), "1234\n");
    assert_eq!(run(&mut roots.run(["--setuid"], script)), "0\n");
}

#[test]
fn what_is_bound_read_only_stays_so() {
    let roots = RootBox::new();
    let shared = roots.dir().join("shared");
    fs::create_dir(&shared).unwrap();
    let bind = format!("{}:/shared", shared.display());
    run_failing(&mut roots.run(["--bind", &bind], "touch /shared/x"));
    run_failing(&mut roots.run(["--bind", &bind], "mount -o remount,rw /shared"));
    assert_eq!(fs::read_dir(&shared).unwrap().count(), 0);
}

#[test]
fn a_layer_does_not_say_where_the_own_folders_are() {
    let roots = RootBox::new();
    let layer = crate::setup::root_box::small_layer(roots.dir());
    fs::create_dir(layer.join("mnt")).unwrap();
    let flags = ["--root", layer.to_str().unwrap(), "--bind", "/usr:/usr"];
    for name in ["proc", "sys", "dev", "tmp", "run"] {
        for target in ["/mnt", "mnt", "."] {
            std::os::unix::fs::symlink(target, layer.join(name)).unwrap();
            let (code, said) = run_failing(&mut roots.run(flags, "cat /mnt/sys/kernel/core_pattern"));
            assert!(code == 125 && said.contains(&format!("at /{name}")), "{name} {target}: {code}: {said}");
            fs::remove_file(layer.join(name)).unwrap();
        }
        fs::write(layer.join(name), "").unwrap();
        assert_eq!(run_failing(&mut roots.run(flags, "true")).0, 125, "{name}");
        fs::remove_file(layer.join(name)).unwrap();
        // What a layer has in a folder of its own is covered.
        fs::create_dir(layer.join(name)).unwrap();
    }
    std::os::unix::fs::symlink("/mnt", layer.join("proc/sys")).unwrap();
    run(&mut roots
        .run(flags, "! echo x 2>/dev/null >/proc/sys/kernel/core_pattern; test -z \"$(cat /proc/keys)\""));
    assert_eq!(roots.leftovers(&[]), [""; 0]);
}

#[test]
fn the_hosts_program_cannot_be_changed_from_inside() {
    let roots = RootBox::new();
    let program = roots.dir().join("hayloft");
    copy_program(crate::setup::farm::HAYLOFT, &program);
    let mode = fs::metadata(&program).unwrap().mode();
    let layer = crate::setup::root_box::small_layer(roots.dir());
    // To this program the script is a configuration file in which all is a comment.
    let trap = layer.join("trap");
    fs::write(&trap, "#!/proc/self/exe --config\n").unwrap();
    fs::set_permissions(&trap, fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = std::process::Command::new(&program);
    command.args(["run", "--name", "trap", "--root", layer.to_str().unwrap(), "--bind", "/usr:/usr"]);
    command.args(["--", "/trap", "serve", "--store", "file:///store", "--listen", "127.0.0.1:0"]);
    command.env("HAYLOFT_STATE_DIR", roots.state()).env("HAYLOFT_CONFIG", "/dev/null");
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let enter =
        |script: &str| roots.hayloft(["root", "enter", "trap", "--", "sh", "-c", script]).output().unwrap();
    wait_until("the program runs in the root", Duration::from_secs(20), || {
        let said = enter("tr '\\0' ' ' </proc/2/cmdline").stdout;
        String::from_utf8_lossy(&said).contains("--config /trap serve")
    });
    let output = enter("exec 2>&1; chmod 4755 /proc/2/exe; chown 1 /proc/2/exe; echo x >>/proc/2/exe");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(said.matches("Read-only file system").count(), 2, "{said}");
    assert_eq!(fs::metadata(&program).unwrap().mode(), mode);
    run(&mut roots.hayloft(["root", "rm", "--force", "trap"]));
    child.wait().unwrap();
}

#[test]
fn a_link_in_a_layer_does_not_lead_mounts_to_the_host() {
    let roots = RootBox::new();
    let layer = crate::setup::root_box::small_layer(roots.dir());
    let outside = roots.dir().join("outside");
    fs::create_dir(&outside).unwrap();
    std::os::unix::fs::symlink(&outside, layer.join("way")).unwrap();
    fs::create_dir_all(layer.join(outside.strip_prefix("/").unwrap())).unwrap();
    let layer = layer.to_str().unwrap();
    let flags = ["--root", layer, "--bind", "/usr:/usr", "--bind", "/etc:/way"];
    let inside = format!("test -e {}/passwd", outside.display());
    run(&mut roots.run(flags, &inside));
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
}

#[test]
fn what_is_open_for_reading_cannot_be_written() {
    let roots = RootBox::new();
    let file = roots.dir().join("in.txt");
    fs::write(&file, "original\n").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
    run(&mut roots.run(["--keep", "--name", "k"], "true"));
    let script = "exec 2>/dev/null; cat; echo changed >/proc/self/fd/0 || echo refused
        chmod 4777 /proc/self/fd/0 || echo refused; (exec 3<>/proc/self/fd/0; echo changed >&3) || echo refused";
    let mut enter = roots.hayloft(["root", "enter", "k", "--", "sh", "-c", script]);
    for command in [&mut roots.run([], script), &mut enter] {
        let said = run(command.stdin(fs::File::open(&file).unwrap()));
        assert_eq!(said, "original\nrefused\nrefused\nrefused\n");
        assert_eq!(fs::read_to_string(&file).unwrap(), "original\n");
        assert_eq!(fs::metadata(&file).unwrap().mode() & 0o7777, 0o640);
    }
    // As an output it can be read, and no more.
    let script = "! echo changed 2>/dev/null >/proc/self/fd/2; cat /proc/self/fd/2";
    let said = run(roots.run([], script).stderr(fs::File::open(&file).unwrap()));
    assert_eq!(said, "original\n");
}

#[test]
fn a_file_is_read_from_where_the_caller_stands() {
    use std::io::{Read, Seek};
    let roots = RootBox::new();
    let path = roots.dir().join("script");
    fs::write(&path, "exit 9\necho from the script\n").unwrap();
    for is_there in [true, false] {
        let mut file = fs::File::open(&path).unwrap();
        if !is_there {
            fs::remove_file(&path).unwrap();
        }
        file.read_exact(&mut [0; 7]).unwrap();
        let said = run(roots.hayloft(["run", "--", "sh"]).stdin(file.try_clone().unwrap()));
        assert_eq!(said, "from the script\n", "{is_there}");
        assert_eq!(file.stream_position().unwrap(), 7);
    }
    // More than a pipe holds, of a file that is not there any more.
    let mut big = tempfile::tempfile().unwrap();
    big.write_all(&vec![b'x'; 1 << 20]).unwrap();
    let again = fs::File::open(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&big))).unwrap();
    assert_eq!(run(roots.run([], "wc -c").stdin(again.try_clone().unwrap())), "1048576\n");
    assert_eq!(run(roots.run([], "head -c 1").stdin(again)), "x");
    // What is no file comes as it is.
    let script = "echo piped | \"$0\" run -- cat; \"$0\" run -- wc -c </dev/null";
    let mut command = crate::setup::farm::sh(script);
    command.current_dir("/");
    command.arg(crate::setup::farm::HAYLOFT).env("HAYLOFT_STATE_DIR", roots.state());
    assert_eq!(run(command.env("HAYLOFT_CONFIG", "/dev/null")), "piped\n0\n");
}

#[test]
fn a_folder_is_no_standard_descriptor() {
    use std::os::unix::fs::OpenOptionsExt;
    let roots = RootBox::new();
    run(&mut roots.run(["--keep", "--name", "k"], "true"));
    let script = "cd /proc/self/fd/0; echo written >from_root";
    let folder = || fs::File::open(roots.dir()).unwrap();
    let (code, said) = run_failing(roots.run([], script).stdin(folder()));
    assert!(code == 125 && said.contains("standard input is a folder"), "{code}: {said}");
    let (code, said) = run_failing(roots.run([], "true").stdout(folder()));
    assert!(code == 125 && said.contains("standard output is a folder"), "{code}: {said}");
    let enter = ["root", "enter", "k", "--", "sh", "-c", script];
    let (code, said) = run_failing(roots.hayloft(enter).stdin(folder()));
    assert!(code == 2 && said.contains("standard input is a folder"), "{code}: {said}");
    let path = fs::OpenOptions::new().read(true).custom_flags(libc::O_PATH).open("/etc/passwd").unwrap();
    let (code, said) = run_failing(roots.run([], "true").stdin(path));
    assert!(code == 125 && said.contains("O_PATH"), "{code}: {said}");
    assert!(!roots.dir().join("from_root").exists());
}

#[test]
fn a_disk_that_is_open_for_reading_cannot_be_written() {
    let roots = RootBox::new();
    let image = roots.dir().join("image");
    fs::write(&image, vec![b'x'; 1 << 20]).unwrap();
    let device = run(crate::setup::farm::sh("losetup --find --show \"$0\"").arg(&image));
    let device = device.trim();
    let script = "head -c 4; echo y >/proc/self/fd/0 || echo refused";
    let output = roots.run([], script).stdin(fs::File::open(device).unwrap()).output();
    run(crate::setup::farm::sh("losetup --detach \"$0\"").arg(device));
    assert_eq!(String::from_utf8_lossy(&output.unwrap().stdout), "xxxxrefused\n");
    assert_eq!(fs::read(&image).unwrap()[..4], *b"xxxx");
}
