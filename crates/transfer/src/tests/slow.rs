//! Web servers that are slow, silent, or far away.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::*;
use crate::web::{Patience, Web};

/// How a web server sends bodies of packs.
#[derive(Default)]
struct Manner {
    /// Bytes of packs that it sends before it is silent, with connections that stay open.
    most: AtomicU64,
    /// The same for each connection.
    most_each: AtomicU64,
    /// A byte, and a pause.
    drips: AtomicBool,
    /// So many later connections get a short page for a pack, as of a portal or a proxy, and are closed.
    pages: AtomicU64,
    /// Milliseconds between pieces of 16 KiB.
    pause_ms: AtomicU64,
    /// Milliseconds before each answer.
    far_ms: AtomicU64,
    /// Bytes of packs that were sent.
    sent: AtomicU64,
    connections: AtomicU64,
    requests: AtomicU64,
}

/// Answers what comes on a connection, one after the other.
fn answer(stream: TcpStream, folder: &Path, manner: &Manner) -> std::io::Result<()> {
    let is_later = manner.connections.fetch_add(1, Relaxed) >= 4;
    stream.set_nodelay(true)?;
    let (mut read, mut stream) = (BufReader::new(stream.try_clone()?), stream);
    let mut left = usize::try_from(manner.most_each.load(Relaxed)).unwrap_or(usize::MAX);
    loop {
        let (mut line, mut range) = (String::new(), None);
        read.read_line(&mut line)?;
        let Some(path) = line.split(' ').nth(1).map(|path| path.trim_start_matches('/').to_owned()) else {
            return Ok(());
        };
        loop {
            line.clear();
            if read.read_line(&mut line)? == 0 || line.trim().is_empty() {
                break;
            }
            if let Some(asked) = line.to_lowercase().strip_prefix("range: bytes=") {
                let (begin, end) = asked.trim().split_once('-').unwrap();
                range = Some((begin.parse::<usize>().unwrap(), end.parse::<usize>().unwrap() + 1));
            }
        }
        manner.requests.fetch_add(1, Relaxed);
        std::thread::sleep(Duration::from_millis(manner.far_ms.load(Relaxed)));
        if is_later
            && path.starts_with("packs/")
            && manner.pages.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1)).is_ok()
        {
            let page = "x".repeat(100);
            return write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{page}", page.len());
        }
        let bytes = fs::read(folder.join(&path))?;
        let (begin, end) = range.unwrap_or((0, bytes.len()));
        let status = if range.is_some() { "206 Partial Content" } else { "200 OK" };
        write!(stream, "HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n", end - begin)?;
        if !path.starts_with("packs/") {
            stream.write_all(&bytes[begin..end])?;
            continue;
        }
        let (mut at, step) = (begin, if manner.drips.load(Relaxed) { 1 } else { 16 << 10 });
        while at < end {
            let (mut some, wanted) = (0, step.min(end - at).min(left));
            let _ = manner.most.fetch_update(Relaxed, Relaxed, |most| {
                some = wanted.min(usize::try_from(most).unwrap_or(usize::MAX));
                Some(most - some as u64)
            });
            if some == 0 {
                // Silent, for as long as somebody listens.
                return read.read_line(&mut line).map(drop);
            }
            left -= some;
            stream.write_all(&bytes[at..at + some])?;
            manner.sent.fetch_add(some as u64, Relaxed);
            at += some;
            let pause_ms = if step == 1 { 20 } else { manner.pause_ms.load(Relaxed) };
            std::thread::sleep(Duration::from_millis(pause_ms));
        }
    }
}

fn serve(folder: &Path) -> (String, Arc<Manner>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = format!("http://{}", listener.local_addr().unwrap());
    let [most, most_each] = [(); 2].map(|()| AtomicU64::new(u64::MAX));
    let manner = Arc::new(Manner { most, most_each, ..Manner::default() });
    let (folder, shared) = (folder.to_owned(), Arc::clone(&manner));
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (folder, manner) = (folder.clone(), Arc::clone(&shared));
            // Who has heard enough has gone.
            std::thread::spawn(move || drop(answer(stream.unwrap(), &folder, &manner)));
        }
    });
    (at, manner)
}

fn impatient(at: &str) -> Source {
    let patience = Patience {
        silence: Duration::from_millis(300),
        period: Duration::from_millis(400),
        least: 1000,
        pause: Duration::from_millis(5),
    };
    Source::Web(Web::new(at, patience))
}

/// Brings what the version `one` has; says how far that has come, and how it has ended.
fn bring(source: &Source, cache: &Cache) -> (u64, u64, Result<Received, TransferError>) {
    let record = source.record("v", "one").unwrap();
    let (come, all) = (AtomicU64::new(0), AtomicU64::new(0));
    let progress = |done, total| {
        come.fetch_max(done, Relaxed);
        all.store(total, Relaxed);
    };
    let received = manifest(&mut Packs::new(source, &record), &record, cache, &[])
        .and_then(|wanted| fetch(&mut Packs::new(source, &record), &record, wanted, &[], cache, &progress));
    (come.into_inner(), all.into_inner(), received)
}

/// A file of noise as the version `one` on a mirror.
fn mirror(len: usize) -> (TempDir, TempDir, Manifest) {
    let [from, mirror] = [(); 2].map(|()| tempdir().unwrap());
    fs::write(from.path().join("f"), noise(1, len)).unwrap();
    let (sent, _) = send_folder(from.path(), mirror.path(), "one");
    (from, mirror, sent)
}

#[test]
fn who_gets_nothing_any_more_says_so_and_goes_on_later() {
    let (_from, mirror, sent) = mirror(3_000_000);
    let (at, manner) = serve(mirror.path());
    let (_dir, cache) = cache();
    let source = impatient(&at);
    manner.most.store(2_000_000, Relaxed);
    let (come, all, ended) = bring(&source, &cache);
    let error = ended.err().unwrap().to_string();
    assert!(error.contains("packs/") && error.contains("has sent nothing for"), "{error}");
    assert!(come > 1_500_000 && come < all, "{come} of {all} were told");
    // Of what has come at most the frames that were not whole come again, one for each request.
    manner.most.store(u64::MAX, Relaxed);
    let before = manner.sent.load(Relaxed);
    let (come, all, ended) = bring(&source, &cache);
    let again = manner.sent.load(Relaxed) - before;
    assert!(again < 1_000_000 + 4 * 270_000 + 50_000, "{again} bytes came after that");
    assert_eq!(come, all);
    let to = tempdir().unwrap();
    ended.unwrap().apply(to.path(), None, &[], &|_, _| {}).unwrap();
    assert_eq!(read(to.path()).tree, sent.tree);
}

#[test]
fn a_cut_in_the_middle_of_a_range_brings_only_the_rest_again() {
    let (_from, mirror, sent) = mirror(3_000_000);
    let (at, manner) = serve(mirror.path());
    let (_dir, cache) = cache();
    let source = impatient(&at);
    // Who is asked again over another connection goes on.
    manner.most_each.store(700_000, Relaxed);
    let (_, _, ended) = bring(&source, &cache);
    assert_eq!(ended.unwrap().manifest.tree, sent.tree);
    let sent = manner.sent.load(Relaxed);
    assert!(sent < 3_200_000, "{sent} bytes were sent of 3,000,000");
}

#[test]
fn a_page_in_place_of_the_rest_of_a_range_spoils_nothing() {
    let (_from, mirror, sent) = mirror(3_000_000);
    let (at, manner) = serve(mirror.path());
    let (_dir, cache) = cache();
    manner.most_each.store(700_000, Relaxed);
    manner.pages.store(2, Relaxed);
    let (_, _, ended) = bring(&impatient(&at), &cache);
    assert_eq!(ended.unwrap().manifest.tree, sent.tree);
    assert_eq!(manner.pages.load(Relaxed), 0, "nobody has got a page");
    let sent = manner.sent.load(Relaxed);
    assert!(sent < 3_200_000, "{sent} bytes were sent of 3,000,000");
}

#[test]
fn a_mirror_that_sends_a_byte_now_and_then_is_given_up() {
    let (_from, mirror, _) = mirror(1_000_000);
    let (at, manner) = serve(mirror.path());
    let (_dir, cache) = cache();
    let source = impatient(&at);
    manner.drips.store(true, Relaxed);
    let error = bring(&source, &cache).2.err().unwrap().to_string();
    assert!(error.contains("bytes in"), "{error}");
}

/// Each request takes longer than the server may be silent.
#[test]
fn a_slow_mirror_that_goes_on_is_waited_for() {
    let (_from, mirror, sent) = mirror(3_000_000);
    let (at, manner) = serve(mirror.path());
    let (_dir, cache) = cache();
    manner.pause_ms.store(20, Relaxed);
    let (_, _, ended) = bring(&impatient(&at), &cache);
    assert_eq!(ended.unwrap().manifest.tree, sent.tree);
}

#[test]
fn a_mirror_that_is_far_is_asked_seldom_and_over_few_connections() {
    let (_from, mirror, sent) = mirror(30_000_000);
    let (at, manner) = serve(mirror.path());
    let (_dir, cache) = cache();
    let source = impatient(&at);
    manner.far_ms.store(100, Relaxed);
    let (_, _, ended) = bring(&source, &cache);
    assert_eq!(ended.unwrap().manifest.tree, sent.tree);
    let (connections, requests) = (manner.connections.load(Relaxed), manner.requests.load(Relaxed));
    assert!(connections <= 6, "{connections} connections");
    assert!(requests < 50, "{requests} requests for 30 MB");
}
