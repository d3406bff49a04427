//! `hayloft clients` and `hayloft evict`.

use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{EvictClient, ListClients, SessionInfo};
use serde_json::{Value, json};

use crate::server::admin::Admin;
use crate::server::args::{ClientsArgs, EvictArgs};
use crate::units::{show_count, show_duration};

/// Lists who is connected to a server.
///
/// # Errors
/// What the server refuses; an unreachable server.
pub(crate) fn list(args: &ClientsArgs) -> anyhow::Result<u8> {
    let mut admin = Admin::connect(&args.server)?;
    let volume = args.volume.clone().unwrap_or_default();
    let Answer::Clients(answer) = admin.ask_at_once(Ask::ListClients(ListClients { volume }))? else {
        return Err(admin.unexpected());
    };
    let clients = answer.clients;
    if args.json {
        println!("{}", Value::Array(clients.iter().map(to_json).collect()));
        return Ok(0);
    }
    if clients.is_empty() {
        eprintln!("nobody has a volume mounted");
        return Ok(0);
    }
    println!(
        "{:16}  {:12}  {:16}  {:>8}  {:>10}  {:>10}  {:>8}  {:>9}  MOUNTED AT",
        "SESSION", "VOLUME", "HOST", "PID", "OWNS", "READS", "WAITING", "SILENT"
    );
    for client in &clients {
        println!(
            "{:016x}  {:12}  {:16}  {:>8}  {:>10}  {:>10}  {:>8}  {:>9}  {}{}{}",
            client.session,
            client.volume,
            client.host_name,
            client.pid,
            show_count(client.own_directories + client.own_files),
            show_count(client.read_directories),
            show_count(client.events_waiting),
            show_duration(std::time::Duration::from_millis(client.silent_ms)),
            client.mount_point,
            if client.read_only { " (read-only)" } else { "" },
            if client.connected { "" } else { " (not connected)" },
        );
    }
    Ok(0)
}

/// Ends a session.
///
/// # Errors
/// What the server refuses; an unreachable server.
pub(crate) fn evict(args: &EvictArgs) -> anyhow::Result<u8> {
    let mut admin = Admin::connect(&args.server)?;
    let question = EvictClient { volume: args.volume.clone(), session: args.session };
    let Answer::Clients(answer) = admin.ask_at_once(Ask::EvictClient(question))? else {
        return Err(admin.unexpected());
    };
    for client in &answer.clients {
        if args.json {
            println!("{}", to_json(client));
        } else {
            println!(
                "ended session {:016x} of {} (process {}, at {})",
                client.session, client.host_name, client.pid, client.mount_point
            );
        }
    }
    Ok(0)
}

fn to_json(client: &SessionInfo) -> Value {
    json!({
        "volume": client.volume,
        "session": format!("{:016x}", client.session),
        "host": client.host_name,
        "pid": client.pid,
        "mount_point": client.mount_point,
        "read_only": client.read_only,
        "connected": client.connected,
        "silent_ms": client.silent_ms,
        "own_directories": client.own_directories,
        "read_directories": client.read_directories,
        "own_files": client.own_files,
        "events_waiting": client.events_waiting,
        "lag_ms": client.lag_ms,
        "locks": client.locks,
        "last_sequence": client.last_sequence,
        "protocol": client.protocol,
        "release": client.release,
    })
}
