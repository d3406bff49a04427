//! An object that comes in parts.

use async_trait::async_trait;
use object_store::{MultipartUpload, PutPayload, PutResult, Result, UploadPart};

use crate::sealed::blocks::{BLOCK, Blocks, Cipher, Id, Parts, sealed_len};

/// Encrypts the parts of an object on their way. The last block is known as that when no more comes.
#[derive(Debug)]
pub(super) struct Upload {
    inner: Box<dyn MultipartUpload>,
    cipher: Cipher,
    path: String,
    id: Id,
    next: u64,
    /// Content that is in no block yet.
    rest: Vec<u8>,
}

impl Upload {
    pub(super) fn new(inner: Box<dyn MultipartUpload>, cipher: Cipher, path: String, id: Id) -> Upload {
        Upload { inner, cipher, path, id, next: 0, rest: Vec::new() }
    }

    /// Encrypts what has come: whole blocks, except the last one until `is_last`.
    fn seal(&mut self, is_last: bool) -> PutPayload {
        let mut blocks = Blocks::new(&self.cipher, &self.path);
        let (mut sealed, mut taken) = (Parts::new(sealed_len(self.rest.len() as u64)), 0);
        let block = BLOCK as usize;
        while self.rest.len() - taken > block {
            let content = &self.rest[taken..taken + block];
            blocks.seal(&self.id, self.next, false, sealed.next(), |out| out.extend_from_slice(content));
            (taken, self.next) = (taken + block, self.next + 1);
        }
        if is_last {
            let content = &self.rest[taken..];
            blocks.seal(&self.id, self.next, true, sealed.next(), |out| out.extend_from_slice(content));
            taken = self.rest.len();
        }
        self.rest.drain(..taken);
        sealed.payload()
    }
}

#[async_trait]
impl MultipartUpload for Upload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        data.iter().for_each(|part| self.rest.extend_from_slice(part));
        match self.seal(false) {
            sealed if sealed.content_length() == 0 => Box::pin(std::future::ready(Ok(()))),
            sealed => self.inner.put_part(sealed),
        }
    }

    async fn complete(&mut self) -> Result<PutResult> {
        let sealed = self.seal(true);
        self.inner.put_part(sealed).await?;
        self.inner.complete().await
    }

    async fn abort(&mut self) -> Result<()> {
        self.inner.abort().await
    }
}
