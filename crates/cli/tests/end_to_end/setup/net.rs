//! A network of hosts: network namespaces, each joined by a pair of veth to the server's.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::setup::farm::{run, sh};

/// The server's address, which is on no cable: each host has its own way to it.
pub(crate) const SERVER: &str = "10.99.0.1";

/// A server's host, and others.
pub(crate) struct Net {
    name: String,
    hosts: usize,
}

impl Net {
    pub(crate) fn new(hosts: usize) -> Net {
        static SERIAL: AtomicU32 = AtomicU32::new(0);
        let name = format!("hl{}-{}", std::process::id(), SERIAL.fetch_add(1, Ordering::Relaxed));
        let net = Net { name, hosts };
        let server = net.server();
        run(&mut sh(&format!(
            "ip netns add {server}; ip -n {server} link set lo up; ip -n {server} address add {SERVER}/32 dev lo"
        )));
        for at in 0..hosts {
            let host = net.host(at);
            run(&mut sh(&format!(
                "ip netns add {host}
                ip -n {host} link set lo up
                ip -n {host} link add cable type veth peer name to{at} netns {server}
                ip -n {server} address add 10.99.{n}.1/24 dev to{at}
                ip -n {host} address add 10.99.{n}.2/24 dev cable
                ip -n {server} link set to{at} up
                ip -n {host} link set cable up
                ip -n {host} route add default via 10.99.{n}.1",
                n = at + 1
            )));
        }
        net
    }

    pub(crate) fn server(&self) -> String {
        format!("{}-server", self.name)
    }

    pub(crate) fn host(&self, at: usize) -> String {
        format!("{}-{at}", self.name)
    }

    /// Gives a host another address. Of its connections, none hears of that.
    pub(crate) fn readdress(&self, at: usize) {
        run(&mut sh(&format!(
            "ip -n {host} address del 10.99.{n}.2/24 dev cable
            ip -n {host} address add 10.99.{n}.3/24 dev cable
            ip -n {host} route add default via 10.99.{n}.1",
            host = self.host(at),
            n = at + 1
        )));
    }

    /// Pulls a host's cable out.
    pub(crate) fn cut(&self, at: usize) {
        run(&mut sh(&format!("ip -n {} link set to{at} down", self.server())));
    }

    /// Puts it in again.
    pub(crate) fn join(&self, at: usize) {
        run(&mut sh(&format!("ip -n {} link set to{at} up", self.server())));
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        // What failed half-way is removed as well.
        for name in (0..self.hosts).map(|at| self.host(at)).chain([self.server()]) {
            let _ = sh(&format!("ip netns del {name}")).status();
        }
    }
}
