//! INIT: the first message, in which both sides say what they can do.

use crate::handling::config::{Config, Readdirplus, Transport};
use crate::handling::error::SessionError;
use crate::protocol::abi::{
    Fields, InHeader, MAJOR, MINOR_NEWEST, MINOR_OLDEST, Malformed, PAGE_SIZE, capability,
};

/// What the kernel offered and what was agreed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelInfo {
    /// Major version of the protocol (7).
    pub major: u32,
    /// Minor version of the protocol that the kernel speaks.
    pub minor: u32,
    /// What the kernel can do ([`capability`]).
    pub offered: u64,
    /// What is in use.
    pub agreed: u64,
    /// The transport in use: never [`Transport::Auto`].
    pub transport: Transport,
    /// Largest write in bytes.
    pub max_write: u32,
    /// Largest read-ahead in bytes.
    pub max_readahead: u32,
}

impl KernelInfo {
    /// Whether all of these [`capability`] bits were agreed on.
    pub fn has(&self, capabilities: u64) -> bool {
        self.agreed & capabilities == capabilities
    }
}

/// `fuse_init_in`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct InitIn {
    major: u32,
    minor: u32,
    max_readahead: u32,
    flags: u64,
}

impl InitIn {
    pub(crate) fn parse(body: &[u8]) -> Result<InitIn, Malformed> {
        let mut fields = Fields(body);
        let (major, minor) = (fields.u32()?, fields.u32()?);
        let (max_readahead, mut flags) = (fields.u32().unwrap_or(0), u64::from(fields.u32().unwrap_or(0)));
        if flags & capability::INIT_EXT != 0 {
            flags |= u64::from(fields.u32()?) << 32;
        }
        Ok(InitIn { major, minor, max_readahead, flags })
    }

    pub(crate) fn major(&self) -> u32 {
        self.major
    }
}

/// Decides what to agree on. `ring` tells whether the transport can be io_uring.
pub(crate) fn negotiate(init: &InitIn, config: &Config, ring: bool) -> Result<KernelInfo, SessionError> {
    if init.major != MAJOR || init.minor < MINOR_OLDEST {
        return Err(SessionError::OldKernel { major: init.major, minor: init.minor });
    }
    let agreed = wanted(config, ring) & init.flags;
    let transport =
        if agreed & capability::OVER_IO_URING != 0 { Transport::IoUring } else { Transport::DevFuse };
    Ok(KernelInfo {
        major: init.major,
        minor: init.minor,
        offered: init.flags,
        agreed,
        transport,
        max_write: config.max_write,
        max_readahead: config.max_readahead.min(init.max_readahead),
    })
}

fn wanted(config: &Config, ring: bool) -> u64 {
    use capability::*;
    let always = ASYNC_READ
        | BIG_WRITES
        | ASYNC_DIO
        | PARALLEL_DIROPS
        | MAX_PAGES
        | SETXATTR_EXT
        | INIT_EXT
        | HAS_EXPIRE_ONLY
        | NO_OPEN_SUPPORT
        | NO_OPENDIR_SUPPORT;
    let when = |condition: bool, bits: u64| if condition { bits } else { 0 };
    always
        | when(config.posix_locks, POSIX_LOCKS)
        | when(config.flock_locks, FLOCK_LOCKS)
        | when(config.atomic_o_trunc, ATOMIC_O_TRUNC)
        | when(config.export_support, EXPORT_SUPPORT)
        | when(config.writeback_cache, WRITEBACK_CACHE)
        | when(config.readdirplus != Readdirplus::Off, DO_READDIRPLUS)
        | when(config.readdirplus == Readdirplus::Auto, READDIRPLUS_AUTO)
        | when(config.cache_symlinks, CACHE_SYMLINKS)
        | when(config.handle_killpriv, HANDLE_KILLPRIV_V2)
        | when(config.posix_acl, POSIX_ACL)
        | if config.auto_inval_data { AUTO_INVAL_DATA } else { EXPLICIT_INVAL_DATA }
        | when(ring, OVER_IO_URING)
}

/// `fuse_init_out`, 64 bytes.
pub(crate) fn init_out(info: &KernelInfo, config: &Config) -> [u8; 64] {
    let mut out = [0; 64];
    let mut put = |offset: usize, value: u32| {
        out[offset..offset + 4].copy_from_slice(&value.to_ne_bytes());
    };
    put(0, MAJOR);
    put(4, info.minor.min(MINOR_NEWEST));
    put(8, info.max_readahead);
    put(12, info.agreed as u32);
    put(20, info.max_write);
    // Times are kept to the nanosecond.
    put(24, 1);
    put(32, (info.agreed >> 32) as u32);
    let pages = u16::try_from(info.max_write as usize / PAGE_SIZE).unwrap_or(u16::MAX);
    out[16..18].copy_from_slice(&config.max_background.to_ne_bytes());
    out[18..20].copy_from_slice(&config.congestion_threshold.to_ne_bytes());
    out[28..30].copy_from_slice(&pages.to_ne_bytes());
    out
}

/// `fuse_init_out` for a kernel with a newer major version: it will ask again with ours.
pub(crate) fn major_only() -> [u8; 64] {
    let mut out = [0; 64];
    out[0..4].copy_from_slice(&MAJOR.to_ne_bytes());
    out[4..8].copy_from_slice(&MINOR_NEWEST.to_ne_bytes());
    out
}

/// Whether a message is INIT.
pub(crate) fn is_init(header: &InHeader) -> bool {
    header.opcode == crate::protocol::abi::opcode::INIT
}

#[cfg(test)]
mod tests {
    use super::*;

    fn init(minor: u32, flags: u64) -> InitIn {
        let mut body = Vec::new();
        for field in [7, minor, 131_072, flags as u32, (flags >> 32) as u32] {
            body.extend(field.to_ne_bytes());
        }
        body.resize(64, 0);
        InitIn::parse(&body).unwrap()
    }

    #[test]
    fn only_what_the_kernel_offers_is_agreed_on() {
        let all = init(45, u64::MAX);
        let info = negotiate(&all, &Config::default(), true).unwrap();
        assert_eq!(info.transport, Transport::IoUring);
        assert_eq!(info.max_readahead, 131_072);
        assert!(info.has(capability::EXPLICIT_INVAL_DATA | capability::READDIRPLUS_AUTO));
        assert!(!info.has(capability::AUTO_INVAL_DATA) && !info.has(capability::ATOMIC_O_TRUNC));
        assert!(!info.has(capability::PASSTHROUGH));
        // DONT_MASK and the three splice capabilities.
        assert_eq!(info.agreed & (0b1111 << 6), 0);

        let few = init(31, capability::ASYNC_READ | capability::MAX_PAGES);
        let info = negotiate(&few, &Config::default(), true).unwrap();
        assert_eq!(info.agreed, capability::ASYNC_READ | capability::MAX_PAGES);
        assert_eq!(info.transport, Transport::DevFuse);
    }

    #[test]
    fn old_kernels_are_refused_in_words() {
        let error = negotiate(&init(30, u64::MAX), &Config::default(), false).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the kernel speaks FUSE 7.30, at least 7.31 is needed: use Linux 5.4 or newer"
        );
    }

    #[test]
    fn no_open_and_atomic_o_trunc_exclude_each_other() {
        let mut config = Config { no_open: true, ..Config::default() };
        assert_eq!(config.fault(), None);
        config.atomic_o_trunc = true;
        assert!(config.fault().unwrap().contains("lose truncations"));
        config.no_open = false;
        assert_eq!(config.fault(), None);
    }

    #[test]
    fn the_answer_is_laid_out_as_fuse_init_out() {
        let config = Config { max_background: 0x1234, congestion_threshold: 0x567, ..Config::default() };
        let info = negotiate(&init(99, u64::MAX), &config, true).unwrap();
        let out = init_out(&info, &config);
        let at = |offset: usize| u32::from_ne_bytes(out[offset..offset + 4].try_into().unwrap());
        assert_eq!((at(0), at(4), at(8)), (7, MINOR_NEWEST, 131_072));
        assert_eq!((at(12), at(32)), (info.agreed as u32, (info.agreed >> 32) as u32));
        assert_eq!((at(20), at(24)), (1 << 20, 1));
        assert_eq!([&out[16..20], &out[28..30]], [&[0x34, 0x12, 0x67, 0x05][..], &[0, 1][..]]);
        assert!(out[36..].iter().all(|byte| *byte == 0));
    }
}
