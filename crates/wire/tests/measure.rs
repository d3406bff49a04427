//! What the checks of frames cost. `cargo test --release -p hayloft-wire --test measure -- --ignored --nocapture` prints it.

use std::hint::black_box;
use std::time::Instant;

use bytes::{Bytes, BytesMut};
use hayloft_wire::client_message::Body;
use hayloft_wire::frame::{self, Opener, Sealer};
use hayloft_wire::{Chunk, ClientMessage, Ping};

/// Nanoseconds of one of so many.
fn each(times: u32, mut run: impl FnMut()) -> f64 {
    let begun = Instant::now();
    (0..times).for_each(|_| run());
    begun.elapsed().as_nanos() as f64 / f64::from(times)
}

#[test]
#[ignore = "prints figures"]
fn checks_of_frames() {
    let content = |len: usize| {
        let payload = Bytes::from((0..len).map(|at| (at * 7) as u8).collect::<Vec<u8>>());
        Body::Content(Chunk { hash: vec![1; 32].into(), len: len as u32, codec: 0, payload })
    };
    for (what, body, times) in [
        ("a ping", Body::Ping(Ping {}), 2_000_000),
        ("1 KiB", content(1 << 10), 500_000),
        ("64 KiB", content(64 << 10), 20_000),
    ] {
        let message = ClientMessage { request: 7, body: Some(body) };
        for round in 0..3 {
            let (mut bytes, mut buffer) = (Vec::new(), BytesMut::new());
            let plain = each(times, || {
                bytes.clear();
                frame::encode_plain(&message, &mut bytes);
                buffer.extend_from_slice(&bytes);
                let taken: Option<ClientMessage> = frame::take_plain(&mut buffer, 1 << 20).unwrap();
                black_box(taken);
            });
            let (mut sealer, mut opener, mut buffer) =
                (Sealer::default(), Opener::default(), BytesMut::new());
            let checked = each(times, || {
                bytes.clear();
                frame::encode(&message, &mut bytes);
                sealer.seal(&mut bytes);
                buffer.extend_from_slice(&bytes);
                let taken: Option<ClientMessage> = opener.take(&mut buffer).unwrap();
                black_box(taken);
            });
            println!(
                "round {round}: {what}: {plain:.0} ns without checks, {checked:.0} ns with them, both ends"
            );
        }
    }
}
