//! `plimsoll export`: what was planned, as a configuration of another program.

use std::path::{Path, PathBuf};

use plimsoll_plan::Exported;
use plimsoll_plan::config::Imported;

use crate::args::ExportArgs;
use crate::asked::Asked;
use crate::failure::Failure;
use crate::output::{out, outln, write_error, write_file};

pub fn run(args: &ExportArgs) -> Result<(), Failure> {
    let asked = Asked::new(&args.source, &Imported::default(), &args.machine, true)?;
    let (plan, _) = asked.plan_in_brief()?;
    if !plan.fits() {
        return Err(Failure::does_not_fit(format!(
            "nothing was exported: {}; plimsoll plan says with the same arguments what would fit",
            plan.misfits().join("; ")
        )));
    }
    let exported = plan.export(args.format, asked.target.map_or(1, |target| target.nodes))?;
    match &args.output {
        Some(file) => write(&exported, file),
        None => show(&exported),
    }
}

fn show(exported: &Exported) -> Result<(), Failure> {
    out!("{}", exported.text()?)?;
    if !exported.has_comments() {
        write_error(format_args!("{}", exported.remarks()));
    }
    Ok(())
}

fn write(exported: &Exported, file: &Path) -> Result<(), Failure> {
    write_file("the configuration", file, exported.text()?.as_bytes())?;
    if exported.has_comments() {
        outln!("{}", file.display())?;
        return Ok(());
    }
    let mut name = file.as_os_str().to_owned();
    name.push(".notes.txt");
    let notes = PathBuf::from(name);
    write_file("what could not be carried over", &notes, exported.remarks().as_bytes())?;
    outln!("{}\n{}", file.display(), notes.display())?;
    Ok(())
}
