//! A network that flips bits on the way to the server.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::setup::farm::{Farm, noise, run, wait_until};

/// Passes connections on, and damages what clients send in bulk while it has flips left.
struct Flipper {
    address: String,
    flips: Arc<AtomicUsize>,
}

impl Flipper {
    fn before(server: &str) -> Flipper {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let flips = Arc::new(AtomicUsize::new(0));
        let (server, left) = (server.to_owned(), Arc::clone(&flips));
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let Ok(upstream) = TcpStream::connect(&server) else { continue };
                let (back, forth) = (upstream.try_clone().unwrap(), client.try_clone().unwrap());
                let left = Arc::clone(&left);
                std::thread::spawn(move || pass(forth, upstream, &left));
                std::thread::spawn(move || pass(back, client, &AtomicUsize::new(0)));
            }
        });
        Flipper { address, flips }
    }

    fn flip(&self, times: usize) {
        self.flips.store(times, Ordering::SeqCst);
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream, flips: &AtomicUsize) {
    let mut buffer = vec![0; 256 << 10];
    while let Ok(read @ 1..) = from.read(&mut buffer) {
        // Only content comes in such pieces.
        let is_left = |left: usize| left.checked_sub(1);
        if read > 32 << 10 && flips.fetch_update(Ordering::SeqCst, Ordering::SeqCst, is_left).is_ok() {
            buffer[read / 2] ^= 4;
        }
        if to.write_all(&buffer[..read]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}

fn write_durably(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(content)?;
    file.sync_all()
}

#[test]
fn a_flipped_bit_in_an_upload_is_sent_again_and_harms_nothing_that_is_stored() {
    let farm = Farm::new();
    farm.create("v");
    let content = noise(7, 6 << 20);
    let mount = farm.mount("v", "");
    write_durably(&mount.join("old"), &content).unwrap();
    mount.unmount();
    let flipper = Flipper::before(&farm.address);
    let mount = farm.mount_through(&flipper.address, "v", "mnt-flipped");
    for round in 0..5 {
        flipper.flip(1);
        write_durably(&mount.join(&format!("copy-{round}")), &content).unwrap();
    }
    // When it never gets through whoever waits is told, and nothing is lost.
    flipper.flip(usize::MAX);
    let error = write_durably(&mount.join("never"), &content).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EIO), "{error}");
    flipper.flip(0);
    wait_until("it gets through", Duration::from_secs(60), || {
        File::open(mount.join("never")).unwrap().sync_all().is_ok()
    });
    mount.unmount();
    assert!(run(&mut farm.volume(["check", "v", "--content"])).contains("is sound"));
    let mount = farm.mount("v", "");
    for entry in fs::read_dir(mount.path()).unwrap() {
        let path = entry.unwrap().path();
        assert!(fs::read(&path).unwrap() == content, "{}", path.display());
    }
    assert_eq!(fs::read_dir(mount.path()).unwrap().count(), 7);
}
