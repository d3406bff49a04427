//! Web servers that do not tell the truth.

use std::sync::atomic::AtomicUsize;

use super::*;

/// What a web server does to what it is asked for, once the version's record was told.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Lie {
    None,
    /// The body ends before it should.
    CutOff,
    /// More comes than was asked for, and than there is.
    Longer,
    /// Another part than was asked for, as the right one.
    Shifted,
    /// All of the file, as if it was the part.
    WholeAsPart,
    /// Nothing, as the part.
    Empty,
    /// A bit is another one.
    Flipped,
    /// Go there, which is here.
    Redirected,
    /// A body that never ends.
    Endless,
    /// The server says that it cannot.
    Fails,
    /// There is no such part, it says.
    NoSuchRange,
    /// No HTTP at all.
    Noise,
    /// The connection is closed at once.
    Closed,
}

const LIES: [Lie; 12] = [
    Lie::CutOff,
    Lie::Longer,
    Lie::Shifted,
    Lie::WholeAsPart,
    Lie::Empty,
    Lie::Flipped,
    Lie::Redirected,
    Lie::Endless,
    Lie::Fails,
    Lie::NoSuchRange,
    Lie::Noise,
    Lie::Closed,
];

fn answer(mut stream: TcpStream, folder: &Path, lie: Lie) -> std::io::Result<()> {
    let mut read = BufReader::new(stream.try_clone()?);
    let (mut line, mut range) = (String::new(), None);
    read.read_line(&mut line)?;
    let path = line.split(' ').nth(1).unwrap_or_default().trim_start_matches('/').to_owned();
    while read.read_line(&mut line)? > 0 && !line.ends_with("\r\n\r\n") {
        let last = line.lines().last().unwrap_or_default().to_lowercase();
        if let Some(asked) = last.strip_prefix("range: bytes=") {
            let (begin, end) = asked.trim().split_once('-').unwrap();
            range = Some((begin.parse::<usize>().unwrap(), end.parse::<usize>().unwrap() + 1));
        }
    }
    let Ok(bytes) = fs::read(folder.join(&path)) else {
        return stream.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    };
    let lie = if path.starts_with("packs/") { lie } else { Lie::None };
    let (begin, end) = range.unwrap_or((0, bytes.len()));
    let status = if range.is_some() { "206 Partial Content" } else { "200 OK" };
    let mut body = bytes[begin..end].to_vec();
    let mut length = body.len();
    match lie {
        Lie::CutOff => body.truncate(length / 2),
        Lie::Longer => {
            body.extend_from_slice(&[7; 100_000]);
            length = body.len();
        }
        Lie::Shifted => {
            let begin = begin.checked_sub(1).unwrap_or(1);
            body = bytes[begin..(begin + length).min(bytes.len())].to_vec();
        }
        Lie::WholeAsPart => {
            body.clone_from(&bytes);
            length = body.len();
        }
        Lie::Empty => (body, length) = (Vec::new(), 0),
        Lie::Flipped => {
            let at = body.len() / 2;
            body[at] ^= 4;
        }
        Lie::Redirected => {
            let head = format!(
                "HTTP/1.1 302 Found\r\nLocation: /{path}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            );
            return stream.write_all(head.as_bytes());
        }
        Lie::Endless => {
            stream.write_all(format!("HTTP/1.1 {status}\r\nConnection: close\r\n\r\n").as_bytes())?;
            loop {
                stream.write_all(&[0; 65_536])?;
            }
        }
        Lie::Fails => {
            return stream.write_all(b"HTTP/1.1 503 Later\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
        }
        Lie::NoSuchRange => {
            return stream.write_all(b"HTTP/1.1 416 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
        }
        Lie::Noise => return stream.write_all(&noise(9, 5000)),
        Lie::Closed => return Ok(()),
        Lie::None => {}
    }
    let head = format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n");
    stream.write_all(head.as_bytes())?;
    stream.write_all(&body)
}

/// A server that lies about packs as it is told to, by the number of the lie.
fn serve(folder: PathBuf, lie: Arc<AtomicUsize>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = format!("http://{}/", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (folder, lie) = (folder.clone(), LIES.get(lie.load(Relaxed)).copied().unwrap_or(Lie::None));
            std::thread::spawn(move || answer(stream.unwrap(), &folder, lie));
        }
    });
    at
}

/// Nothing is made of a lie, and nothing of it is left: from the same server, honest again, all comes as it was sent.
#[test]
fn what_a_web_server_tells_falsely_is_refused_and_leaves_nothing() {
    let [from, mirror] = [(); 2].map(|()| tempdir().unwrap());
    make(from.path());
    let (sent, _) = send_folder(from.path(), mirror.path(), "one");
    std::thread::scope(|scope| {
        // With lies from the beginning, and with such that begin when it is known what there is.
        for late in [false, true] {
            for (number, told) in LIES.into_iter().enumerate() {
                let (mirror, sent) = (mirror.path().to_owned(), &sent.tree);
                scope.spawn(move || {
                    let lie = Arc::new(AtomicUsize::new(LIES.len()));
                    let at = serve(mirror, Arc::clone(&lie));
                    let (_dir, cache) = cache();
                    let source = Source::new(&at);
                    let record = source.record("v", "one").unwrap();
                    let all = || -> Result<Received, TransferError> {
                        lie.store(if late { LIES.len() } else { number }, Relaxed);
                        let wanted = manifest(&mut Packs::new(&source, &record), &record, &cache, &[])?;
                        lie.store(number, Relaxed);
                        fetch(&mut Packs::new(&source, &record), &record, wanted, &[], &cache, &|_, _| {})
                    };
                    let done = all();
                    // More than was asked for does no harm: what was is right.
                    let is_harmless = told == Lie::Longer;
                    assert_eq!(done.is_ok(), is_harmless, "{:?}: {:?}", told, done.err());
                    lie.store(LIES.len(), Relaxed);
                    let to = tempdir().unwrap();
                    let received = receive_into(&source, "one", to.path(), &[], &cache);
                    assert_eq!(&received.manifest.tree, sent, "{:?}", told);
                });
            }
        }
    });
}
