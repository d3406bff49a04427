//! `hayloft volume`.

use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{
    CheckVolume, CreateVolume, DeleteVolume, GrantMessage, ListVolumes, SetQuota, SetRights, ShowVolume,
    SweepVolume, VolumeInfo, VolumeStatus,
};
use serde_json::{Value, json};

use crate::config::{Config, DEFAULT_SERVER};
use crate::exit::Exit;
use crate::progress;
use crate::server::admin::Admin;
use crate::server::args::{
    CheckArgs, CreateArgs, DeleteArgs, ScrubArgs, SetQuotaArgs, VolumeArgs, VolumeVerb,
};
use crate::sys;
use crate::units::{show_count, show_size, show_utc};

/// Runs the command.
///
/// # Errors
/// What the server refuses; an unreachable server.
pub(crate) fn run(args: VolumeArgs, config: &Config) -> anyhow::Result<u8> {
    let server = args.server.or_else(|| config.server.clone()).unwrap_or_else(|| DEFAULT_SERVER.to_owned());
    let mut admin = Admin::connect(&server)?;
    let json = args.json;
    match args.verb {
        VolumeVerb::Create(args) => create(&mut admin, &args, json),
        VolumeVerb::List => list(&mut admin, json),
        VolumeVerb::Show(args) => show(&mut admin, &args.name, json),
        VolumeVerb::Delete(args) => delete(&mut admin, &args, json),
        VolumeVerb::Sweep(args) => sweep(&mut admin, &args.name, json),
        VolumeVerb::Check(args) => check(&mut admin, &args, json),
        VolumeVerb::Grant(args) => {
            let grant = GrantMessage { who: args.who, right: args.right, from: args.from };
            set_rights(&mut admin, args.name, Some(grant), None, json)
        }
        VolumeVerb::Revoke(args) => {
            let grant = GrantMessage { who: args.who, ..GrantMessage::default() };
            set_rights(&mut admin, args.name, Some(grant), None, json)
        }
        VolumeVerb::SetTrusted(args) => {
            set_rights(&mut admin, args.name, None, Some(args.trusted == "yes"), json)
        }
        VolumeVerb::SetQuota(args) => set_quota(&mut admin, &args, json),
    }
}

/// Creates a volume.
///
/// # Errors
/// As the server says, [`Exit::Exists`] among them.
pub(crate) fn create_volume(admin: &mut Admin, args: &CreateArgs) -> anyhow::Result<VolumeInfo> {
    let (uid, gid) = args.owner.unwrap_or_else(sys::user_and_group);
    let grant = |(who, right): &(String, String)| GrantMessage {
        who: who.clone(),
        right: right.clone(),
        from: Vec::new(),
    };
    let grants = args.grant.iter().map(grant);
    let answer = admin.ask(Ask::CreateVolume(CreateVolume {
        name: args.name.clone(),
        quota_bytes: args.quota,
        quota_inodes: args.inodes,
        mode: args.mode,
        uid,
        gid,
        trusted: args.trusted,
        grants: grants.collect(),
    }))?;
    one_volume(admin, answer)
}

/// Deletes a volume, and if that is wanted its snapshots.
///
/// # Errors
/// As the server says, [`Exit::Busy`] among them while it is mounted.
pub(crate) fn delete_volume(admin: &mut Admin, name: &str, snapshots: bool) -> anyhow::Result<()> {
    match admin.ask(Ask::DeleteVolume(DeleteVolume { name: name.to_owned(), snapshots }))? {
        Answer::Done(_) => Ok(()),
        _ => Err(admin.unexpected()),
    }
}

fn create(admin: &mut Admin, args: &CreateArgs, json: bool) -> anyhow::Result<u8> {
    let volume = create_volume(admin, args)?;
    if json {
        println!("{}", to_json(&volume));
    } else {
        println!("created volume {}", volume.name);
    }
    Ok(0)
}

fn list(admin: &mut Admin, json: bool) -> anyhow::Result<u8> {
    let Answer::Volumes(answer) = admin.ask(Ask::ListVolumes(ListVolumes {}))? else {
        return Err(admin.unexpected());
    };
    let mut volumes = answer.volumes;
    volumes.sort_by(|a, b| a.name.cmp(&b.name));
    let exit = if volumes.iter().all(|volume| volume.damage.is_empty()) { 0 } else { Exit::Damaged.code() };
    if json {
        println!("{}", Value::Array(volumes.iter().map(to_json).collect()));
        return Ok(exit);
    }
    if volumes.is_empty() {
        eprintln!("no volumes yet; make one with `hayloft volume create NAME`");
        return Ok(0);
    }
    let width = volumes.iter().map(|volume| volume.name.len()).max().unwrap_or(0).max("VOLUME".len());
    println!("{:width$}  {:>10}  {:>12}  {:>10}  MOUNTED BY", "VOLUME", "USED", "INODES", "QUOTA");
    for volume in &volumes {
        if !volume.damage.is_empty() {
            println!("{:width$}  {}", volume.name, volume.damage);
            continue;
        }
        let status = volume.status.unwrap_or_default();
        let clients: Vec<&str> = volume.clients.iter().map(|client| client.host_name.as_str()).collect();
        println!(
            "{:width$}  {:>10}  {:>12}  {:>10}  {}",
            volume.name,
            show_size(status.used_bytes),
            show_count(status.used_inodes),
            if status.quota_bytes == 0 { "none".to_owned() } else { show_size(status.quota_bytes) },
            if clients.is_empty() { "-".to_owned() } else { clients.join(", ") },
        );
    }
    Ok(exit)
}

fn show(admin: &mut Admin, name: &str, json: bool) -> anyhow::Result<u8> {
    let ask = ShowVolume { name: name.to_owned(), reclaimable: true, brief: false };
    let looking = "looks at all rows for what a sweep would give back";
    let answer = progress::waited(looking, || admin.ask(Ask::ShowVolume(ask)))?;
    let volume = one_volume(admin, answer)?;
    if json {
        let mut shown = to_json(&volume);
        shown["snapshots"] = volume.snapshots.into();
        shown["own_bytes"] = volume.own_bytes.into();
        shown["shared_bytes"] = volume.shared_bytes.into();
        shown["reclaimable_bytes"] = volume.reclaimable_bytes.into();
        println!("{shown}");
        return Ok(0);
    }
    let status = volume.status.unwrap_or_default();
    let limit =
        |quota: u64, shown: String| if quota == 0 { "no limit".to_owned() } else { format!("limit {shown}") };
    println!("{:12} {}", "volume", volume.name);
    println!("{:12} {}", "id", volume.id);
    println!("{:12} {}", "created", show_utc(volume.created_secs));
    println!(
        "{:12} {} ({})",
        "used",
        show_size(status.used_bytes),
        limit(status.quota_bytes, show_size(status.quota_bytes))
    );
    println!(
        "{:12} {} ({})",
        "inodes",
        show_count(status.used_inodes),
        limit(status.quota_inodes, show_count(status.quota_inodes))
    );
    if let (Some(free), Some(total)) = (known(status.store_free_bytes), known(status.store_total_bytes)) {
        println!("{:12} {} free of {}", "store", show_size(free), show_size(total));
    }
    if !volume.origin.is_empty() {
        println!("{:12} {}", "forked from", volume.origin);
    }
    println!("{:12} {}", "snapshots", show_count(volume.snapshots));
    println!(
        "{:12} {} of its own, {} shared with its snapshots and forks",
        "stored",
        show_size(volume.own_bytes),
        show_size(volume.shared_bytes),
    );
    if let Some(bytes) = volume.reclaimable_bytes {
        println!("{:12} {} by a sweep now", "reclaimable", show_size(bytes));
    }
    if volume.trusted {
        println!("{:12} yes: device and setuid files count where it is mounted", "trusted");
    }
    for grant in &volume.grants {
        println!("{:12} {}", "right", show_grant(grant));
    }
    if volume.clients.is_empty() {
        println!("{:12} nobody", "mounted by");
    }
    for client in &volume.clients {
        println!(
            "{:12} {} on {} (process {}{}; {} directories held, batch {})",
            "mounted by",
            client.host_name,
            client.mount_point,
            client.pid,
            if client.connected { "" } else { ", not connected" },
            show_count(client.grants),
            client.last_sequence,
        );
    }
    Ok(0)
}

/// A volume of the server.
///
/// # Errors
/// When there is none of that name.
pub(crate) fn show_volume(admin: &mut Admin, name: &str) -> anyhow::Result<VolumeInfo> {
    let ask = ShowVolume { name: name.to_owned(), reclaimable: false, brief: true };
    let answer = admin.ask(Ask::ShowVolume(ask))?;
    one_volume(admin, answer)
}

/// The answer that is one volume.
///
/// # Errors
/// It is another one.
pub(crate) fn one_volume(admin: &Admin, answer: Answer) -> anyhow::Result<VolumeInfo> {
    match answer {
        Answer::Volumes(mut answer) if answer.volumes.len() == 1 => Ok(answer.volumes.remove(0)),
        _ => Err(admin.unexpected()),
    }
}

fn delete(admin: &mut Admin, args: &DeleteArgs, json: bool) -> anyhow::Result<u8> {
    let name = &args.name;
    delete_volume(admin, name, args.snapshots)?;
    if json {
        println!("{}", json!({ "deleted": name }));
    } else {
        println!("deleted volume {name}");
    }
    Ok(0)
}

fn sweep(admin: &mut Admin, name: &str, json: bool) -> anyhow::Result<u8> {
    let Answer::Swept(swept) = admin.ask(Ask::SweepVolume(SweepVolume { name: name.to_owned() }))? else {
        return Err(admin.unexpected());
    };
    if json {
        println!(
            "{}",
            json!({
                "packs_deleted": swept.packs_deleted,
                "packs_rewritten": swept.packs_rewritten,
                "bytes_reclaimed": swept.bytes_reclaimed,
            })
        );
    } else {
        println!(
            "gave {} back to the store ({} packs deleted, {} rewritten)",
            show_size(swept.bytes_reclaimed),
            show_count(swept.packs_deleted),
            show_count(swept.packs_rewritten)
        );
    }
    Ok(0)
}

fn check(admin: &mut Admin, args: &CheckArgs, json: bool) -> anyhow::Result<u8> {
    let question =
        CheckVolume { name: args.name.clone(), content: args.content, repair: args.repair, scrub: false };
    let Answer::Checked(checked) = admin.ask(Ask::CheckVolume(question))? else {
        return Err(admin.unexpected());
    };
    if json {
        println!(
            "{}",
            json!({
                "inodes": checked.inodes,
                "dentries": checked.dentries,
                "chunks": checked.chunks,
                "problems": checked.problems,
                "mended": checked.mended,
            })
        );
    } else {
        let what = format!(
            "{} inodes, {} names, {} pieces of content",
            show_count(checked.inodes),
            show_count(checked.dentries),
            show_count(checked.chunks)
        );
        checked.mended.iter().for_each(|mended| println!("{mended}"));
        checked.problems.iter().for_each(|problem| println!("{problem}"));
        match checked.problems.len() {
            0 => println!("volume {} is sound: {what}", args.name),
            count => println!("volume {} is damaged: {count} problems in {what}", args.name),
        }
    }
    Ok(if checked.problems.is_empty() { 0 } else { Exit::Damaged.code() })
}

fn show_grant(grant: &GrantMessage) -> String {
    let from = if grant.from.is_empty() { String::new() } else { format!(" from {}", grant.from.join(" ")) };
    format!("{} {}{from}", grant.who, grant.right)
}

/// Changes rights, and shows the volume.
fn set_rights(
    admin: &mut Admin,
    name: String,
    grant: Option<GrantMessage>,
    trusted: Option<bool>,
    json: bool,
) -> anyhow::Result<u8> {
    let answer = admin.ask(Ask::SetRights(SetRights { name, grant, trusted }))?;
    let volume = one_volume(admin, answer)?;
    if json {
        println!("{}", to_json(&volume));
        return Ok(0);
    }
    let counts = if volume.trusted { "count" } else { "do not count" };
    println!("volume {}: device and setuid files {counts} where it is mounted", volume.name);
    volume.grants.iter().for_each(|grant| println!("  {}", show_grant(grant)));
    Ok(0)
}

/// `hayloft scrub`.
///
/// # Errors
/// What the server refuses; an unreachable server.
pub(crate) fn scrub(args: ScrubArgs, config: &Config) -> anyhow::Result<u8> {
    let server = args.server.or_else(|| config.server.clone()).unwrap_or_else(|| DEFAULT_SERVER.to_owned());
    let mut admin = Admin::connect(&server)?;
    let names = match args.volume {
        Some(name) => vec![name],
        None => match admin.ask(Ask::ListVolumes(ListVolumes {}))? {
            Answer::Volumes(found) => found.volumes.into_iter().map(|volume| volume.name).collect(),
            _ => return Err(admin.unexpected()),
        },
    };
    let (mut told, mut is_damaged) = (Vec::new(), false);
    for name in names {
        let question = CheckVolume { name: name.clone(), scrub: true, ..CheckVolume::default() };
        let Answer::Checked(checked) = admin.ask(Ask::CheckVolume(question))? else {
            return Err(admin.unexpected());
        };
        is_damaged |= !checked.problems.is_empty();
        if args.json {
            told.push(json!({ "volume": name, "objects": checked.objects, "problems": checked.problems }));
            continue;
        }
        checked.problems.iter().for_each(|problem| println!("{problem}"));
        println!(
            "volume {name}: {} objects read, {} damaged",
            show_count(checked.objects),
            show_count(checked.problems.len() as u64)
        );
    }
    if args.json {
        println!("{}", Value::Array(told));
    }
    Ok(if is_damaged { Exit::Damaged.code() } else { 0 })
}

fn set_quota(admin: &mut Admin, args: &SetQuotaArgs, json: bool) -> anyhow::Result<u8> {
    let now = show_volume(admin, &args.name)?.status.unwrap_or_default();
    let quota_bytes = args.quota.unwrap_or(now.quota_bytes);
    let quota_inodes = args.inodes.unwrap_or(now.quota_inodes);
    let question = SetQuota { name: args.name.clone(), quota_bytes, quota_inodes };
    admin.ask(Ask::SetQuota(question))?;
    if json {
        println!(
            "{}",
            json!({ "name": args.name, "quota_bytes": quota_bytes, "quota_inodes": quota_inodes })
        );
    } else {
        let shown = |quota: u64, text: String| if quota == 0 { "unlimited".to_owned() } else { text };
        println!(
            "volume {} may hold: bytes {}, inodes {}",
            args.name,
            shown(quota_bytes, show_size(quota_bytes)),
            shown(quota_inodes, show_count(quota_inodes))
        );
    }
    Ok(0)
}

/// A figure that a store may be unable to tell.
fn known(bytes: u64) -> Option<u64> {
    (bytes != u64::MAX).then_some(bytes)
}

/// A volume as JSON.
pub(crate) fn to_json(volume: &VolumeInfo) -> Value {
    let status: VolumeStatus = volume.status.unwrap_or_default();
    let clients: Vec<Value> = volume
        .clients
        .iter()
        .map(|client| {
            json!({
                "session": format!("{:016x}", client.session),
                "host": client.host_name,
                "pid": client.pid,
                "mount_point": client.mount_point,
                "connected": client.connected,
                "grants": client.grants,
                "last_sequence": client.last_sequence,
            })
        })
        .collect();
    if !volume.damage.is_empty() {
        return json!({ "name": volume.name, "damage": volume.damage });
    }
    json!({
        "name": volume.name,
        "id": volume.id,
        "created": volume.created_secs,
        "used_bytes": status.used_bytes,
        "used_inodes": status.used_inodes,
        "quota_bytes": status.quota_bytes,
        "quota_inodes": status.quota_inodes,
        "store_free_bytes": known(status.store_free_bytes),
        "store_total_bytes": known(status.store_total_bytes),
        "clients": clients,
        "trusted": volume.trusted,
        "origin": if volume.origin.is_empty() { Value::Null } else { volume.origin.as_str().into() },
        "rights": volume.grants.iter().map(|of| json!({"who": of.who, "right": of.right, "from": of.from})).collect::<Vec<_>>(),
    })
}
