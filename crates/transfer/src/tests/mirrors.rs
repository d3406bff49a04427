//! Streams, web servers, and what is left of killed commands.

use super::*;

#[test]
fn a_stream_has_what_the_other_side_lacks() {
    let [from, to, mirror, spool] = [(); 4].map(|()| tempdir().unwrap());
    make(from.path());
    let (first, _) = send_folder(from.path(), mirror.path(), "one");
    let (_dir, cache) = cache();
    receive_into(&source(mirror.path()), "one", to.path(), &[], &cache);
    fs::write(from.path().join("new"), noise(5000, 100_000)).unwrap();
    let second = read(from.path());
    let mut stream = Vec::new();
    send(
        &version(&second, from.path(), "two"),
        Some(&first),
        &mut Tar::new(&mut stream).unwrap(),
        &|_, _| {},
    )
    .unwrap();
    assert!(stream.len() < 200_000, "{}", stream.len());
    let record = Folder::new(spool.path()).unwrap().unpack(stream.as_slice()).unwrap();
    assert_eq!(record.snapshot, "two");
    let source = source(spool.path());
    // Whoever lacks the version that it builds on is told.
    let wanted = manifest(&mut Packs::new(&source, &record), &record, &cache, &[]).unwrap();
    let error =
        fetch(&mut Packs::new(&source, &record), &record, wanted, &[], &cache, &|_, _| {}).err().unwrap();
    assert!(error.to_string().contains("--since"), "{error}");
    let copy = tempdir().unwrap();
    assert!(
        std::process::Command::new("cp")
            .arg("-aT")
            .arg(to.path())
            .arg(copy.path())
            .status()
            .unwrap()
            .success()
    );
    let seeds = [Tree { manifest: read(copy.path()), folder: copy.path().to_owned() }];
    receive_into(&source, "two", to.path(), &seeds, &cache);
    // Cut anywhere, or changed, it is refused.
    // The last KiB only says that nothing follows.
    for len in (0..stream.len() - 2048).step_by(stream.len() / 37) {
        let spool = tempdir().unwrap();
        Folder::new(spool.path()).unwrap().unpack(&stream[..len]).unwrap_err();
    }
}

/// However many versions behind, a receiver asks for few indexes: the newest packs are looked at first.
#[test]
fn who_has_missed_versions_does_not_read_all_indexes() {
    let [from, mirror] = [(); 2].map(|()| tempdir().unwrap());
    fs::write(from.path().join("large"), noise(1, 40_000_000)).unwrap();
    let (first, _) = send_folder(from.path(), mirror.path(), "v0");
    let old = copy(from.path());
    for version in 1..5 {
        fs::write(from.path().join("small"), format!("{version}")).unwrap();
        send_folder(from.path(), mirror.path(), &format!("v{version}"));
    }
    let server = serve(mirror.path().to_owned(), true);
    let (_dir, cache) = cache();
    let source = Source::new(&server.at);
    let seeds = [Tree { manifest: first, folder: old.path().to_owned() }];
    let to = tempdir().unwrap();
    receive_into(&source, "v4", to.path(), &seeds, &cache);
    assert!(source.received() < 50_000, "{}", source.received());
}

/// A web server that knows ranges or not, and cuts connections once it has sent so many bytes.
struct Server {
    at: String,
    sent: Arc<AtomicU64>,
    most: Arc<AtomicU64>,
}

fn serve(folder: PathBuf, ranges: bool) -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = format!("http://{}/", listener.local_addr().unwrap());
    let (sent, most) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(u64::MAX)));
    let server = Server { at, sent: Arc::clone(&sent), most: Arc::clone(&most) };
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (folder, sent, most) = (folder.clone(), Arc::clone(&sent), Arc::clone(&most));
            std::thread::spawn(move || answer(stream.unwrap(), &folder, ranges, &sent, &most));
        }
    });
    server
}

fn answer(stream: TcpStream, folder: &Path, ranges: bool, sent: &AtomicU64, most: &AtomicU64) {
    let mut read = BufReader::new(stream.try_clone().unwrap());
    let (mut line, mut range) = (String::new(), None);
    read.read_line(&mut line).unwrap();
    let path = line.split(' ').nth(1).unwrap().trim_start_matches('/').to_owned();
    loop {
        line.clear();
        if read.read_line(&mut line).unwrap() == 0 || line.trim().is_empty() {
            break;
        }
        if let Some(asked) = line.to_lowercase().strip_prefix("range: bytes=").filter(|_| ranges) {
            let (begin, end) = asked.trim().split_once('-').unwrap();
            range = Some((begin.parse::<usize>().unwrap(), end.parse::<usize>().unwrap() + 1));
        }
    }
    let mut stream = stream;
    let Ok(bytes) = fs::read(folder.join(path)) else {
        let _ = stream.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
        return;
    };
    let (status, body) = match range {
        Some((begin, end)) => ("206 Partial Content", &bytes[begin..end]),
        None => ("200 OK", &bytes[..]),
    };
    let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
    let left = most.load(Relaxed);
    let some = body.len().min(usize::try_from(left).unwrap_or(usize::MAX));
    most.store(left - some as u64, Relaxed);
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&body[..some]));
    sent.fetch_add(some as u64, Relaxed);
}

#[test]
fn a_web_server_is_a_mirror_with_ranges_or_without() {
    let [from, mirror] = [(); 2].map(|()| tempdir().unwrap());
    make(from.path());
    let (_, sent) = send_folder(from.path(), mirror.path(), "one");
    for ranges in [true, false] {
        let server = serve(mirror.path().to_owned(), ranges);
        let to = tempdir().unwrap();
        let (_dir, cache) = cache();
        let source = Source::new(&server.at);
        receive_into(&source, "one", to.path(), &[], &cache).forget();
        // Each pack comes once, or one more time until it shows that there are no ranges.
        let most = sent.bytes * if ranges { 1 } else { 2 } + 50_000;
        assert!(source.received() < most, "{} of {}", source.received(), sent.bytes);
        let error = source.record("v", "other").unwrap_err();
        assert!(error.to_string().contains("has no version v@other"), "{error}");
    }
}

#[test]
fn what_has_come_before_a_cut_does_not_come_again() {
    let [from, mirror] = [(); 2].map(|()| tempdir().unwrap());
    fs::write(from.path().join("f"), noise(1, 20_000_000)).unwrap();
    send_folder(from.path(), mirror.path(), "one");
    let server = serve(mirror.path().to_owned(), true);
    let (_dir, cache) = cache();
    let source = Source::new(&server.at);
    let record = source.record("v", "one").unwrap();
    let wanted = manifest(&mut Packs::new(&source, &record), &record, &cache, &[]).unwrap();
    server.most.store(15_000_000, Relaxed);
    let error = fetch(&mut Packs::new(&source, &record), &record, wanted.clone(), &[], &cache, &|_, _| {})
        .err()
        .unwrap();
    assert!(error.to_string().contains("packs/"), "{error}");
    server.most.store(u64::MAX, Relaxed);
    let before = server.sent.load(Relaxed);
    let to = tempdir().unwrap();
    let received =
        fetch(&mut Packs::new(&source, &record), &record, wanted, &[], &cache, &|_, _| {}).unwrap();
    let again = server.sent.load(Relaxed) - before;
    received.apply(to.path(), None, &[], &|_, _| {}).unwrap();
    assert_eq!(read(to.path()).tree, read(from.path()).tree);
    assert!((5_000_000..9_000_000).contains(&again), "{again}");
}
