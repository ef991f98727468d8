//! `plimsoll hardware`: the devices and machines that plans can be made for.

use plimsoll_memory::ByteSize;
use plimsoll_plan::{Catalogue, DeviceModel, Price, Reached, Spill, Target};
use serde_json::json;

use crate::args::HardwareArgs;
use crate::failure::Failure;
use crate::output::{out, outln};
use crate::row;
use crate::table;
use crate::units;

pub fn run(args: &HardwareArgs) -> Result<(), Failure> {
    let catalogue = Catalogue::known();
    if let Some(name) = &args.name {
        let target = catalogue.target(name)?;
        return match args.json {
            true => outln!("{}", serde_json::to_string_pretty(&target)?),
            false => out!("{}", one(catalogue, &target)),
        };
    }
    if args.json {
        let sources: serde_json::Map<String, _> =
            catalogue.sources().map(|(name, text)| (name.to_owned(), text.into())).collect();
        let machines: Vec<Target> = catalogue.machines().collect();
        let document = json!({ "devices": catalogue.devices(), "machines": machines, "sources": sources });
        return outln!("{}", serde_json::to_string_pretty(&document)?);
    }
    let mut rows = vec![row!["device", "memory", "GB/s", "f32", "bf16", "fp8", "host", "link", "$/h"]];
    rows.extend(catalogue.devices().iter().map(device_row));
    out!("{}", table::render(&rows))?;
    let mut rows = vec![row!["machine", "", "host memory", "disk"]];
    rows.extend(catalogue.machines().map(|machine| {
        let disk = machine.disk.as_ref().map_or(String::new(), |disk| disk.size.to_string());
        row![machine.name, machine.title, machine.host_memory, disk]
    }));
    out!(
        "\nTFLOP/s of dense products, as stated; GB/s to the host and to a neighbour, each way. * has no bf16: fp16.\n\n{}",
        table::render(&rows)
    )?;
    outln!(
        "\n8xh100 is a machine of eight, 16x8xh100 are sixteen of those; a .yaml file describes any other.\n\
         plimsoll hardware NAME shows all that is known of one, and where it comes from."
    )
}

fn device_row(device: &DeviceModel) -> Vec<String> {
    let tera = |rate: f64| format!("{:.0}", rate / 1e12);
    let giga = |rate: f64| format!("{:.0}", rate / 1e9);
    let half = tera(device.half) + if device.bf16 { "" } else { "*" };
    row![
        device.name,
        device.memory,
        giga(device.bandwidth),
        tera(device.f32),
        half,
        device.fp8.map_or("-".to_owned(), tera),
        giga(device.host_link),
        device.link.map_or("-".to_owned(), giga),
        device.price.as_ref().map_or("-".to_owned(), dollars),
    ]
}

fn dollars(price: &Price) -> String {
    format!("{:.2} to {:.2}", price.low, price.high)
}

/// Everything about a machine.
fn one(catalogue: &Catalogue, target: &Target) -> String {
    let device = &target.device;
    let giga = |rate: f64| format!("{:.1} GB/s", rate / 1e9);
    let tera = |rate: f64| format!("{:.1} TFLOP/s", rate / 1e12);
    let overhead = ByteSize(device.overhead_bytes(target.devices()));
    let mut rows = match &device.cpu {
        Some(cpu) => vec![
            row!["memory", device.memory],
            row!["of it outside any arena", overhead],
            row!["threads", cpu.threads],
            row!["measured", units::ago(cpu.measured.age().as_secs())],
        ],
        None => vec![
            row!["memory of a device", device.memory],
            row!["of it for context, kernels and communicators", overhead],
            row!["read and written, as stated", giga(device.bandwidth)],
            row!["products in f32, as stated", tera(device.f32)],
            row![if device.bf16 { "in bf16" } else { "in fp16; it has no bf16" }, tera(device.half)],
        ],
    };
    if device.cpu.is_none() {
        rows.extend(device.fp8.map(|rate| row!["in fp8", tera(rate)]));
        rows.extend(device.reached.map(|Reached { products, bandwidth }| {
            let shares =
                format!("{:.0} % of products, {:.0} % of what is read", 100.0 * products, 100.0 * bandwidth);
            row!["steps were measured to reach", shares]
        }));
        if !device.has_tensor_cores() {
            rows.push(row!["in 16 bits in plans: kernels for tensor cores need 8.0", tera(device.f32)]);
        }
        rows.push(row!["host memory of a machine", target.host_memory]);
        rows.push(row!["to the host, each way", giga(device.host_link)]);
    }
    if target.devices_of_machine > 1 {
        rows.push(row!["to a neighbour, each way", giga(target.link)]);
    }
    if target.nodes > 1 {
        rows.push(row!["of a device to other machines", giga(target.network)]);
    }
    if let Some(Spill { size, read, write }) = &target.disk {
        rows.push(row!["disk of a machine", size]);
        rows.push(row!["read, written", format!("{}, {}", giga(*read), giga(*write))]);
    }
    if let Some([low, high]) = target.dollars_an_hour() {
        rows.push(row!["dollars an hour, all of it", format!("{low:.2} to {high:.2}")]);
    }
    let cited = device.source.iter().chain(target.price.as_ref().map(|price| &price.source));
    let cited: Vec<&str> = cited.map(String::as_str).collect();
    let known = catalogue.sources().filter(|(name, _)| cited.contains(name));
    let sources: String = known.map(|(name, text)| format!("{name}: {text}\n")).collect();
    let date = target.price.as_ref().filter(|price| !price.date.is_empty());
    let date = date.map_or(String::new(), |price| format!("the price is of {}\n", price.date));
    format!("{}: {}\n{}\n{sources}{date}", target.name, target.title, table::render(&rows))
}
