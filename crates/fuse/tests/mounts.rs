//! A file system in memory, mounted for real over both transports.

mod memory;

use std::ffi::CString;
use std::fs;
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hayloft_fuse::{Config, MountOptions, Session, SessionError, SessionHandle, Transport, mount};
use memory::Memory;

/// A mount, unmounted at the end.
struct Mounted {
    fs: Arc<Memory>,
    session: Option<SessionHandle>,
    folder: tempfile::TempDir,
}

impl Mounted {
    /// `None`, with the reason printed, where the transport cannot be had.
    fn new(config: Config) -> Option<Mounted> {
        if config.transport == Transport::IoUring
            && let Err(error) = hayloft_fuse::enable_io_uring()
        {
            println!("skipped: FUSE over io_uring cannot be switched on here: {error}");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let channel = match mount(folder.path(), &MountOptions::default()) {
            Ok(channel) => channel,
            Err(error) => {
                println!("skipped: {error}");
                return None;
            }
        };
        let fs = Arc::new(Memory::new());
        let session = Session::new(channel, Arc::clone(&fs), config).unwrap().spawn().unwrap();
        Some(Mounted { fs, session: Some(session), folder })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn session(&self) -> &SessionHandle {
        self.session.as_ref().unwrap()
    }

    fn unmount(mut self) {
        let session = self.session.take().unwrap();
        session.unmount(false).unwrap();
        session.join().unwrap();
        // Nobody but this test holds on to the file system: all threads have ended.
        assert_eq!(Arc::strong_count(&self.fs), 1);
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if let Some(session) = self.session.take() {
            self.fs.open_gate();
            session.unmount(true).ok();
        }
    }
}

fn both(config: Config, test: impl Fn(&Mounted)) {
    for transport in [Transport::DevFuse, Transport::IoUring] {
        let Some(mounted) = Mounted::new(Config { transport, ..config.clone() }) else { continue };
        assert_eq!(mounted.session().kernel().transport, transport);
        test(&mounted);
        mounted.unmount();
    }
}

fn wait_until(condition: impl Fn() -> bool) {
    while !condition() {
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn files_and_directories_work() {
    both(Config::default(), |m| {
        fs::write(m.path("a"), b"hello").unwrap();
        assert_eq!(fs::read(m.path("a")).unwrap(), b"hello");
        fs::create_dir(m.path("d")).unwrap();
        fs::rename(m.path("a"), m.path("d/b")).unwrap();
        assert_eq!(fs::metadata(m.path("a")).unwrap_err().kind(), ErrorKind::NotFound);
        assert_eq!(fs::remove_dir(m.path("d")).unwrap_err().kind(), ErrorKind::DirectoryNotEmpty);
        fs::hard_link(m.path("d/b"), m.path("c")).unwrap();
        assert_eq!(fs::metadata(m.path("c")).unwrap().ino(), fs::metadata(m.path("d/b")).unwrap().ino());
        std::os::unix::fs::symlink("d/b", m.path("l")).unwrap();
        assert_eq!(fs::read_link(m.path("l")).unwrap(), Path::new("d/b"));
        assert_eq!(fs::read(m.path("l")).unwrap(), b"hello");
        fs::set_permissions(m.path("c"), fs::Permissions::from_mode(0o640)).unwrap();
        assert_eq!(fs::metadata(m.path("c")).unwrap().mode() & 0o7777, 0o640);
        let mut file = fs::OpenOptions::new().append(true).read(true).open(m.path("c")).unwrap();
        file.write_all(b", world").unwrap();
        file.seek(SeekFrom::Start(0)).unwrap();
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "hello, world");
        file.set_len(4).unwrap();
        file.sync_all().unwrap();
        assert_eq!(fs::read(m.path("c")).unwrap(), b"hell");
        drop(file);
        fs::remove_file(m.path("d/b")).unwrap();
        fs::remove_dir(m.path("d")).unwrap();
        assert_eq!(names(m.folder.path()), ["c", "l"]);
        let long = "n".repeat(255);
        fs::write(m.path(&long), b"x").unwrap();
        assert_eq!(names(m.folder.path()), ["c", "l", long.as_str()]);
        let counters = m.session().counters();
        assert!(counters.get("CREATE") == 2 && counters.get("LOOKUP") > 0 && counters.get("INIT") == 0);
    });
}

#[test]
fn extended_attributes_work() {
    both(Config::default(), |m| {
        fs::write(m.path("f"), b"").unwrap();
        let value = vec![b'v'; 40_000];
        let path = CString::new(m.path("f").as_os_str().as_bytes()).unwrap();
        let (path, name) = (path.as_ptr(), c"user.a".as_ptr());
        let mut room = vec![0u8; 65_536];
        #[allow(unsafe_code)]
        // SAFETY: all pointers are to live buffers of the lengths given.
        unsafe {
            assert_eq!(libc::setxattr(path, name, value.as_ptr().cast(), value.len(), 0), 0);
            assert_eq!(libc::getxattr(path, name, std::ptr::null_mut(), 0), 40_000);
            assert_eq!(libc::getxattr(path, name, room.as_mut_ptr().cast(), room.len()), 40_000);
            assert_eq!(room[..40_000], value);
            assert_eq!(libc::getxattr(path, name, room.as_mut_ptr().cast(), 10), -1);
            assert_eq!(libc::listxattr(path, room.as_mut_ptr().cast(), room.len()), 7);
            assert_eq!(&room[..7], b"user.a\0");
            assert_eq!(libc::removexattr(path, name), 0);
            assert_eq!(libc::getxattr(path, name, std::ptr::null_mut(), 0), -1);
        }
    });
}

#[test]
fn ten_thousand_entries_are_listed_once_each() {
    both(Config::default(), |m| {
        let folder = m.path("many");
        fs::create_dir(&folder).unwrap();
        for number in 0..10_000 {
            fs::File::create(folder.join(format!("file-{number:05}"))).unwrap();
        }
        let listed = names(&folder);
        assert_eq!(listed.len(), 10_000);
        assert!(listed.iter().enumerate().all(|(i, name)| *name == format!("file-{i:05}")));
        listed.iter().for_each(|name| fs::remove_file(folder.join(name)).unwrap());
        fs::remove_dir(&folder).unwrap();
        // What is gone is forgotten: one reference from each create at least.
        wait_until(|| m.fs.forgotten.load(Ordering::SeqCst) >= 10_000);
    });
}

#[test]
fn large_files_survive() {
    both(Config::default(), |m| {
        let data: Vec<u8> =
            (0..8u32 << 18).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
        fs::write(m.path("large"), &data).unwrap();
        assert!(fs::read(m.path("large")).unwrap() == data);
        // Again without the page cache.
        let notifier = m.session().notifier();
        let ino = fs::metadata(m.path("large")).unwrap().ino();
        assert!(notifier.inval_inode(ino, 0, 0).unwrap());
        assert!(fs::read(m.path("large")).unwrap() == data);
        let mut middle = vec![0; 70_000];
        let file = fs::File::open(m.path("large")).unwrap();
        file.read_exact_at(&mut middle, 3_000_001).unwrap();
        assert!(middle == data[3_000_001..3_070_001]);
    });
}

#[test]
fn threads_do_not_disturb_each_other() {
    both(Config::default(), |m| {
        std::thread::scope(|scope| {
            for thread in 0..8 {
                scope.spawn(move || {
                    for number in 0..200 {
                        let path = m.path(&format!("t{thread}-{number}"));
                        let content = format!("{thread} {number} ").repeat(300);
                        fs::write(&path, &content).unwrap();
                        assert_eq!(fs::read_to_string(&path).unwrap(), content);
                        let renamed = m.path(&format!("r{thread}-{number}"));
                        fs::rename(&path, &renamed).unwrap();
                        fs::remove_file(&renamed).unwrap();
                    }
                });
            }
        });
        assert!(names(m.folder.path()).is_empty());
    });
}

#[test]
fn blocked_requests_leave_room_for_others() {
    // More than a queue's slots at first, more than the pool's threads in all.
    let config = Config { pool_threads_max: 20, queue_depth: 2, ..Config::default() };
    both(config, |m| {
        std::thread::scope(|scope| {
            for folder in 0..30 {
                // Lookups in one directory of one name wait for each other in the kernel.
                fs::create_dir(m.path(&format!("d{folder}"))).unwrap();
                let path = m.path(&format!("d{folder}/slow"));
                scope.spawn(move || assert!(fs::metadata(path).is_err()));
            }
            wait_until(|| m.fs.blocked.load(Ordering::SeqCst) == 20);
            for number in 0..100 {
                fs::write(m.path(&format!("f{number}")), b"x").unwrap();
            }
            assert_eq!(m.fs.blocked.load(Ordering::SeqCst), 20);
            m.fs.open_gate();
        });
        assert_eq!(names(m.folder.path()).len(), 130);
    });
}

#[test]
fn killing_the_caller_interrupts_its_request() {
    both(Config::default(), |m| {
        let mut child = Command::new("stat")
            .arg(m.path("hanging"))
            .stderr(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        wait_until(|| m.fs.blocked.load(Ordering::SeqCst) == 1);
        child.kill().unwrap();
        child.wait().unwrap();
        wait_until(|| m.fs.interrupted.load(Ordering::SeqCst) == 1);
        assert_eq!(m.fs.blocked.load(Ordering::SeqCst), 0);
    });
}

#[test]
fn a_panic_is_an_error_of_one_request() {
    both(Config::default(), |m| {
        let error = fs::metadata(m.path("panicking")).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
        fs::write(m.path("fine"), b"x").unwrap();
    });
}

#[test]
fn a_lazy_unmount_with_a_request_under_way_ends_all_threads() {
    for transport in [Transport::DevFuse, Transport::IoUring] {
        let Some(mut m) = Mounted::new(Config { transport, ..Config::default() }) else { continue };
        let path = m.path("hanging");
        let caller = std::thread::spawn(move || fs::metadata(path).unwrap_err());
        wait_until(|| m.fs.blocked.load(Ordering::SeqCst) == 1);
        let session = m.session.take().unwrap();
        let point = CString::new(m.folder.path().as_os_str().as_bytes()).unwrap();
        #[allow(unsafe_code)]
        // SAFETY: the string ends in NUL.
        let result = unsafe { libc::umount2(point.as_ptr(), libc::MNT_FORCE) };
        // Forced, it aborts what is under way; the mount itself may still be busy.
        if result != 0 {
            session.unmount(true).unwrap();
        }
        caller.join().unwrap();
        session.unmount(true).ok();
        session.join().unwrap();
        assert_eq!(m.fs.interrupted.load(Ordering::SeqCst), 1);
        assert_eq!(Arc::strong_count(&m.fs), 1);
    }
}

#[test]
fn notifications_drop_what_the_kernel_caches() {
    both(Config::default(), |m| {
        fs::write(m.path("f"), b"x").unwrap();
        let lookups = || m.session().counters().get("LOOKUP");
        fs::metadata(m.path("f")).unwrap();
        let before = lookups();
        fs::metadata(m.path("f")).unwrap();
        assert_eq!(lookups(), before);
        let notifier = m.session().notifier();
        assert!(notifier.inval_entry(1, b"f").unwrap());
        fs::metadata(m.path("f")).unwrap();
        assert_eq!(lookups(), before + 1);
        assert!(!notifier.inval_entry(1, b"unknown").unwrap());
        match notifier.inc_epoch() {
            Ok(()) => {
                fs::metadata(m.path("f")).unwrap();
                assert_eq!(lookups(), before + 2);
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::Unsupported),
        }
        let ino = fs::metadata(m.path("f")).unwrap().ino();
        assert!(notifier.store(ino, 0, b"y").unwrap());
        assert_eq!(fs::read(m.path("f")).unwrap(), b"y");
        assert!(notifier.delete(1, ino, b"f").unwrap());
        assert!(!notifier.inval_inode(999, 0, 0).unwrap());
    });
}

#[test]
fn an_ordinary_mount_does_not_hear_of_syncfs() {
    both(Config::default(), |m| {
        assert!(!m.session().control().hears_syncfs(syncs).unwrap());
        assert_eq!(m.session().counters().get("SYNCFS"), 0);
    });
}

#[test]
fn opens_can_do_without_messages() {
    let config = Config { no_open: true, no_opendir: true, ..Config::default() };
    both(config, |m| {
        fs::write(m.path("f"), b"hello").unwrap();
        fs::write(m.path("f"), b"bye").unwrap();
        for _ in 0..10 {
            assert_eq!(fs::read(m.path("f")).unwrap(), b"bye");
            assert_eq!(names(m.folder.path()), ["f"]);
        }
        let counters = m.session().counters();
        assert_eq!((counters.get("OPEN"), counters.get("OPENDIR")), (1, 1));
        // From the CREATE, before the kernel knew.
        assert_eq!(counters.get("RELEASE"), 1);
    });
}

#[test]
fn settings_that_lose_data_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let Ok(channel) = mount(folder.path(), &MountOptions::default()) else { return };
    let config = Config { no_open: true, atomic_o_trunc: true, ..Config::default() };
    let result = Session::new(channel, Memory::new(), config);
    assert!(matches!(result, Err(SessionError::Config(_))));
    // The mount was taken away again.
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn auto_takes_what_there_is() {
    let Some(mounted) = Mounted::new(Config::default()) else { return };
    fs::write(mounted.path("f"), b"x").unwrap();
    let transport = mounted.session().kernel().transport;
    assert!(transport == Transport::DevFuse || hayloft_fuse::io_uring_enabled());
    mounted.unmount();
}

fn syncs(point: &Path) -> std::io::Result<()> {
    let synced = std::process::Command::new("sync").arg("-f").arg(point).status()?;
    if synced.success() { Ok(()) } else { Err(std::io::ErrorKind::Other.into()) }
}
