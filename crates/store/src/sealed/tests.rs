//! What an encrypted store promises, over a store in memory that can be looked into.

use object_store::memory::InMemory;

use super::*;
use crate::{Store, StoreError};

fn sealed() -> (Arc<InMemory>, Sealed) {
    let below = Arc::new(InMemory::new());
    (Arc::clone(&below), Sealed::new(below, &StoreKey::new([3; 32])))
}

fn noise(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    blake3::Hasher::new().finalize_xof().fill(&mut bytes);
    bytes
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

const SIZES: [usize; 8] = [0, 1, 16383, 16384, 16385, 32768, 100_000, 300_000];

#[tokio::test]
async fn any_part_is_read_as_it_was_written() {
    let (below, sealed) = sealed();
    for size in SIZES {
        let content = noise(size);
        let path = Path::from(format!("packs/id/{size}"));
        // In parts that fit no block.
        let parts: PutPayload = content.chunks(7001).map(Bytes::copy_from_slice).collect();
        sealed.put(&path, parts).await.unwrap();
        assert_eq!(sealed.head(&path).await.unwrap().size, size as u64);
        let listed: Vec<_> = sealed.list(Some(&Path::from("packs"))).collect().await;
        assert!(listed.iter().any(|found| found.as_ref().is_ok_and(|meta| meta.size == size as u64)));
        assert_eq!(sealed.get(&path).await.unwrap().bytes().await.unwrap(), content);
        let end = size as u64;
        for range in [0..end, 0..1, end.saturating_sub(5)..end, end / 3..end / 2, 16380..16390, 5..end + 100]
        {
            let read = sealed.get_range(&path, range.clone()).await;
            match range.start < range.end.min(end) {
                true => {
                    let until = range.end.min(end) as usize;
                    assert_eq!(read.unwrap(), content[range.start as usize..until], "{size} {range:?}");
                }
                false => assert!(read.is_err(), "{size} {range:?}"),
            }
        }
        if size > 20 {
            let options = GetOptions { range: Some(GetRange::Suffix(20)), ..GetOptions::default() };
            let read = sealed.get_opts(&path, options).await.unwrap();
            assert_eq!(read.range, end - 20..end);
            assert_eq!(read.bytes().await.unwrap(), content[size - 20..]);
            let options = GetOptions { range: Some(GetRange::Offset(end - 7)), ..GetOptions::default() };
            let read = sealed.get_opts(&path, options).await.unwrap();
            assert_eq!(read.bytes().await.unwrap(), content[size - 7..]);
            let stored = below.get(&path).await.unwrap().bytes().await.unwrap();
            assert_eq!(stored.len() as u64, sealed_len(end));
            assert!(!contains(&stored, &content[..20]));
        }
    }
}

#[tokio::test]
async fn what_comes_in_parts_is_the_same() {
    let (_, sealed) = sealed();
    for size in SIZES {
        let (content, path) = (noise(size), Path::from("volumes/id/db/compacted/x.sst"));
        let mut upload = sealed.put_multipart(&path).await.unwrap();
        for part in content.chunks(50_001) {
            upload.put_part(Bytes::copy_from_slice(part).into()).await.unwrap();
        }
        upload.complete().await.unwrap();
        assert_eq!(sealed.get(&path).await.unwrap().bytes().await.unwrap(), content, "{size}");
    }
}

#[tokio::test]
async fn what_was_changed_cut_moved_or_mixed_is_told() {
    let (below, sealed) = sealed();
    let (path, other) = (Path::from("packs/id/1"), Path::from("packs/id/2"));
    sealed.put(&path, noise(70_000).into()).await.unwrap();
    let first = below.get(&path).await.unwrap().bytes().await.unwrap();
    sealed.put(&path, noise(70_000).into()).await.unwrap();
    let whole = below.get(&path).await.unwrap().bytes().await.unwrap();
    assert_ne!(first, whole, "no two writings are the same");
    let block = SEALED_BLOCK as usize;
    let mut flipped = whole.to_vec();
    flipped[block + 20] ^= 1;
    let mixed = [&whole[..block], &first[block..2 * block], &whole[2 * block..]].concat();
    let swapped = [&whole[block..2 * block], &whole[..block], &whole[2 * block..]].concat();
    let cut = whole[..2 * block].to_vec();
    for (name, damaged) in [
        ("flipped", flipped),
        ("mixed", mixed),
        ("swapped", swapped),
        ("cut at a block", cut),
        ("cut", whole[..100].to_vec()),
        ("emptied", Vec::new()),
    ] {
        below.put(&path, damaged.into()).await.unwrap();
        let error = sealed.get(&path).await.err().unwrap_or_else(|| panic!("{name}"));
        assert!(
            matches!(StoreError::from(error), StoreError::Damaged { path, .. } if path == "packs/id/1"),
            "{name}"
        );
    }
    below.put(&other, whole.into()).await.unwrap();
    assert!(sealed.get(&other).await.is_err(), "of another object");
}

#[tokio::test]
async fn names_of_volumes_are_hidden_and_notes_are_not() {
    let (below, sealed) = sealed();
    sealed.put(&Path::from("registry/secret-project"), Bytes::from_static(b"{ id }").into()).await.unwrap();
    let listed: Vec<_> = below.list(None).collect().await;
    assert!(!listed.iter().any(|meta| meta.as_ref().unwrap().location.as_ref().contains("secret")));
    let found = sealed.list_with_delimiter(Some(&Path::from("registry"))).await.unwrap().objects;
    assert_eq!((found[0].location.as_ref(), found[0].size), ("registry/secret-project", 6));
    let ledger = Path::from("volumes/id/ledger/1");
    sealed.put(&ledger, Bytes::from_static(b"lines").into()).await.unwrap();
    assert_eq!(below.get(&ledger).await.unwrap().bytes().await.unwrap(), "lines");
    sealed.copy(&Path::from("registry/secret-project"), &Path::from("registry/b")).await.unwrap();
    sealed.delete(&Path::from("registry/secret-project")).await.unwrap();
    assert_eq!(sealed.get(&Path::from("registry/b")).await.unwrap().bytes().await.unwrap(), "{ id }");
    assert_eq!(sealed.list(None).collect::<Vec<_>>().await.len(), 2);
}

#[tokio::test]
async fn a_store_is_served_with_its_own_key_alone() {
    let store = |below: &Arc<InMemory>| Store::new("memory", Arc::clone(below) as _, None);
    let (one, two) = (StoreKey::new([1; 32]), StoreKey::new([2; 32]));
    let said = |refused: Result<(), StoreError>| refused.unwrap_err().to_string();
    let below = Arc::new(InMemory::new());
    let plain = store(&below);
    for _ in 0..2 {
        admit(&plain, Some(&one)).await.unwrap();
    }
    assert!(said(admit(&plain, None).await).contains("--key-file"));
    assert!(said(admit(&plain, Some(&two)).await).contains("is not the one"));
    // One of the two marks is enough, and comes again.
    plain.delete("sealed").await.unwrap();
    assert!(admit(&plain, None).await.is_err());
    admit(&plain, Some(&one)).await.unwrap();
    let mark = plain.get("sealed").await.unwrap();
    plain.put("sealed", Bytes::from_static(b"damaged")).await.unwrap();
    assert!(admit(&plain, Some(&two)).await.is_err());
    admit(&plain, Some(&one)).await.unwrap();
    assert_eq!(plain.get("sealed").await.unwrap(), mark);
    let in_the_clear = store(&Arc::new(InMemory::new()));
    admit(&in_the_clear, None).await.unwrap();
    in_the_clear.put("registry/v", Bytes::from_static(b"{}")).await.unwrap();
    assert!(said(admit(&in_the_clear, Some(&one)).await).contains("began without a key"));
    admit(&in_the_clear, None).await.unwrap();
}
