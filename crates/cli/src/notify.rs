//! Telling a service manager that we are ready (`sd_notify(3)`).

use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Sends `READY=1` to the socket in `NOTIFY_SOCKET`; does nothing without one. A manager that does not
/// listen is not our error.
pub(crate) fn ready() {
    let Some(name) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let address = match name.as_bytes() {
        [b'@', rest @ ..] => SocketAddr::from_abstract_name(rest),
        _ => SocketAddr::from_pathname(&name),
    };
    if let (Ok(socket), Ok(address)) = (UnixDatagram::unbound(), address) {
        let _ = socket.send_to_addr(b"READY=1", &address);
    }
}
