//! Which user of this host is at the other end of a TCP connection.
//!
//! The kernel is asked for the socket at the other end, by both addresses (sock_diag(7); where that is not to be had,
//! /proc/net/tcp says the same). Only a socket that is connected and that a process has counts: the kernel gives one that
//! was closed with data under way to root.

use std::io;
use std::net::{IpAddr, SocketAddr};

use rustix::net::netlink::SOCK_DIAG;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socket_with};

/// `SOCK_DIAG_BY_FAMILY`, the type of the request and of its answer.
const BY_FAMILY: u16 = 20;
const NLM_F_REQUEST: u16 = 1;
const NLMSG_ERROR: u16 = 2;
const TCP: u8 = 6;
const ESTABLISHED: u8 = 1;
/// Length of a `nlmsghdr`.
const HEADER: usize = 16;
/// Length of an `inet_diag_req_v2`.
const REQUEST: usize = 56;

/// A socket as the kernel describes it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Found {
    state: u8,
    uid: u32,
    inode: u64,
}

/// Whether both ends of a connection are on this host.
pub(crate) fn is_local(own: IpAddr, peer: IpAddr) -> bool {
    let (own, peer) = (own.to_canonical(), peer.to_canonical());
    own == peer || (own.is_loopback() && peer.is_loopback())
}

/// The user whose process has the other end of a connection between `own`, our end, and `peer`. `None`: it is closed.
///
/// # Errors
/// The kernel does not tell.
pub(crate) fn user_of(own: SocketAddr, peer: SocketAddr) -> io::Result<Option<u32>> {
    let canonical = |of: SocketAddr| SocketAddr::new(of.ip().to_canonical(), of.port());
    let (own, peer) = (canonical(own), canonical(peer));
    let found = match by_netlink(own, peer) {
        Ok(found) => Some(found),
        // A kernel whose module for TCP cannot be loaded says the same of each socket, our own end among them.
        Err(error) if error.kind() == io::ErrorKind::NotFound && by_netlink(peer, own).is_ok() => None,
        Err(error) => {
            tracing::debug!(%error, "no sock_diag: looking into /proc/net");
            by_proc(own, peer)?
        }
    };
    Ok(found.filter(|found| found.state == ESTABLISHED && found.inode != 0).map(|found| found.uid))
}

/// Asks for the socket of which `peer` is the own address.
fn by_netlink(own: SocketAddr, peer: SocketAddr) -> io::Result<Found> {
    let socket =
        socket_with(AddressFamily::NETLINK, SocketType::DGRAM, SocketFlags::CLOEXEC, Some(SOCK_DIAG))?;
    let family = if own.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let mut request = Vec::with_capacity(HEADER + REQUEST);
    request.extend(((HEADER + REQUEST) as u32).to_ne_bytes());
    request.extend(BY_FAMILY.to_ne_bytes());
    request.extend(NLM_F_REQUEST.to_ne_bytes());
    request.extend([0; 8]);
    request.extend([family.as_raw() as u8, TCP, 0, 0]);
    request.extend(u32::MAX.to_ne_bytes());
    request.extend(peer.port().to_be_bytes());
    request.extend(own.port().to_be_bytes());
    request.extend(octets(peer.ip()));
    request.extend(octets(own.ip()));
    // Any interface, any cookie.
    request.extend([0; 4]);
    request.extend([0xff; 8]);
    send(&socket, &request, SendFlags::empty())?;
    let mut answer = [0; 1024];
    let (_, len) = recv(&socket, &mut answer[..], RecvFlags::empty())?;
    parse(&answer[..len.min(1024)])
}

/// The answer: a header and an `inet_diag_msg`, or an error.
fn parse(answer: &[u8]) -> io::Result<Found> {
    let short = || io::Error::new(io::ErrorKind::InvalidData, "an answer of sock_diag that is too short");
    let u32_at = |at: usize| {
        let bytes = answer.get(at..at + 4).ok_or_else(short)?;
        Ok::<u32, io::Error>(u32::from_ne_bytes(bytes.try_into().expect("four bytes")))
    };
    let kind = answer.get(4..6).ok_or_else(short)?;
    match u16::from_ne_bytes([kind[0], kind[1]]) {
        NLMSG_ERROR => Err(io::Error::from_raw_os_error((u32_at(HEADER)? as i32).wrapping_neg())),
        BY_FAMILY => Ok(Found {
            state: *answer.get(HEADER + 1).ok_or_else(short)?,
            uid: u32_at(HEADER + 64)?,
            inode: u32_at(HEADER + 68)?.into(),
        }),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "an unknown answer of sock_diag")),
    }
}

/// An address in the first bytes of sixteen.
fn octets(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => {
            let mut bytes = [0; 16];
            bytes[..4].copy_from_slice(&v4.octets());
            bytes
        }
        IpAddr::V6(v6) => v6.octets(),
    }
}

fn by_proc(own: SocketAddr, peer: SocketAddr) -> io::Result<Option<Found>> {
    // A socket of IPv6 may speak to an address of IPv4.
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        let text = match std::fs::read_to_string(table) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && table.ends_with('6') => continue,
            read => read?,
        };
        if let Some(found) = text.lines().skip(1).find_map(|line| proc_line(line, own, peer)) {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

/// A line of /proc/net/tcp, if it is about the socket of which `peer` is the own address.
fn proc_line(line: &str, own: SocketAddr, peer: SocketAddr) -> Option<Found> {
    let fields: Vec<&str> = line.split_ascii_whitespace().collect();
    if proc_address(fields.get(1)?)? != peer || proc_address(fields.get(2)?)? != own {
        return None;
    }
    Some(Found {
        state: u8::from_str_radix(fields.get(3)?, 16).ok()?,
        uid: fields.get(7)?.parse().ok()?,
        inode: fields.get(9)?.parse().ok()?,
    })
}

/// `0100007F:1D10`: words as they lie in memory, in hexadecimal.
fn proc_address(text: &str) -> Option<SocketAddr> {
    let (address, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let mut bytes = Vec::new();
    for word in address.as_bytes().chunks(8) {
        let word = u32::from_str_radix(std::str::from_utf8(word).ok()?, 16).ok()?;
        bytes.extend(word.to_ne_bytes());
    }
    let address = match bytes.len() {
        4 => IpAddr::from(<[u8; 4]>::try_from(bytes).ok()?),
        16 => IpAddr::from(<[u8; 16]>::try_from(bytes).ok()?).to_canonical(),
        _ => return None,
    };
    Some(SocketAddr::new(address, port))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::time::{Duration, Instant};

    use rustix::process::{Uid, geteuid};
    use rustix::thread::set_thread_res_uid;

    use super::*;

    /// The pairs of addresses at which a connection is tried.
    const LISTEN: [(&str, &str); 3] =
        [("127.0.0.1:0", "127.0.0.1"), ("[::]:0", "127.0.0.1"), ("[::1]:0", "::1")];

    fn accepted(listen: &str, connect: &str, by: Option<u32>) -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind(listen).unwrap();
        let port = listener.local_addr().unwrap().port();
        let to = (connect.to_owned(), port);
        // Of one thread only: the rest of the process stays who it is.
        let connecting = std::thread::spawn(move || {
            if let Some(uid) = by.map(Uid::from_raw) {
                set_thread_res_uid(uid, uid, uid).unwrap();
            }
            TcpStream::connect(to).unwrap()
        });
        (listener.accept().unwrap().0, connecting.join().unwrap())
    }

    fn both(own: SocketAddr, peer: SocketAddr) -> [Option<u32>; 2] {
        let canonical = |of: SocketAddr| SocketAddr::new(of.ip().to_canonical(), of.port());
        let is_held = |found: &Found| found.state == ESTABLISHED && found.inode != 0;
        let by_proc = by_proc(canonical(own), canonical(peer)).unwrap().filter(is_held);
        [user_of(own, peer).unwrap(), by_proc.map(|found| found.uid)]
    }

    #[test]
    fn the_kernel_says_whose_socket_is_at_the_other_end() {
        let own = geteuid().as_raw();
        // Only root can be others.
        let users: &[Option<u32>] = if own == 0 { &[None, Some(65_534), Some(4711)] } else { &[None] };
        for (listen, connect) in LISTEN {
            for by in users {
                let (here, there) = accepted(listen, connect, *by);
                let (own_address, peer) = (here.local_addr().unwrap(), here.peer_addr().unwrap());
                assert!(is_local(own_address.ip(), peer.ip()));
                assert_eq!(both(own_address, peer), [Some(by.unwrap_or(own)); 2], "{listen}");
                // That the kernel knows our own end tells a peer that has gone from a kernel that does not look.
                let of = |of: SocketAddr| SocketAddr::new(of.ip().to_canonical(), of.port());
                let known = by_netlink(of(peer), of(own_address));
                assert!(known.is_ok_and(|found| found.inode != 0), "{listen}");
                drop(there);
            }
        }
    }

    #[test]
    fn who_has_closed_a_connection_is_nobody_not_root() {
        for (listen, connect) in LISTEN {
            let (here, mut there) = accepted(listen, connect, None);
            let (own, peer) = (here.local_addr().unwrap(), here.peer_addr().unwrap());
            there.write_all(b"delete everything").unwrap();
            drop(there);
            // The end has arrived once this end may read it.
            let deadline = Instant::now() + Duration::from_secs(20);
            while both(own, peer) != [None; 2] {
                assert!(Instant::now() < deadline);
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }

    #[test]
    fn addresses_of_two_hosts_are_not_local() {
        let of = |text: &str| text.parse::<IpAddr>().unwrap();
        assert!(is_local(of("10.0.0.1"), of("::ffff:10.0.0.1")));
        assert!(is_local(of("127.0.0.1"), of("127.0.0.7")));
        assert!(!is_local(of("10.0.0.1"), of("10.0.0.2")));
        assert!(!is_local(of("10.0.0.1"), of("127.0.0.1")));
    }
}
