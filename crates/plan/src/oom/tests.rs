use super::*;

const MIB: u64 = 1 << 20;

fn of(log: &str) -> Diagnosis {
    diagnose(&mut log.as_bytes()).unwrap().unwrap_or_else(|| panic!("nothing in {log}"))
}

/// In hundredths of a GiB, as messages print it.
fn gib(hundredths: u64) -> u64 {
    (hundredths as f64 / 100.0 * GIB as f64) as u64
}

fn is_near(found: Option<u64>, expected: u64) -> bool {
    found.is_some_and(|found| found.abs_diff(expected) <= MIB / 8)
}

#[test]
fn pytorchs_message_is_read_in_all_its_forms() {
    for (line, unallocated, in_use) in [
        (
            "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 1; 23.69 GiB total capacity; 20.51 GiB already allocated; 1.53 GiB free; 20.92 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation.",
            gib(41),
            None,
        ),
        (
            "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacty of 23.69 GiB of which 1.53 GiB is free. Process 4711 has 22.15 GiB memory in use. Of the allocated memory 20.51 GiB is allocated by PyTorch, and 419.84 MiB is reserved by PyTorch but unallocated.",
            gib(41),
            Some(gib(2215)),
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 23.69 GiB of which 1.53 GiB is free. Including non-PyTorch memory, this process has 22.15 GiB memory in use. Of the allocated memory 20.51 GiB is allocated by PyTorch, and 419.84 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            gib(41),
            Some(gib(2215)),
        ),
        (
            "[rank1]: torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 23.69 GiB of which 1.53 GiB is free. Of the allocated memory 20.51 GiB is allocated by PyTorch, and 419.84 MiB is reserved by PyTorch but unallocated.",
            gib(41),
            None,
        ),
    ] {
        let Diagnosis { message, devices, .. } = of(line);
        assert_eq!((message.source, message.device, devices), (Source::Torch, Some(1), vec![1]), "{line}");
        assert_eq!(message.tried, Some(2 * GIB));
        assert!(is_near(message.total, gib(2369)) && is_near(message.free, gib(153)), "{message:?}");
        assert!(
            is_near(message.allocated, gib(2051)) && is_near(message.unallocated, unallocated),
            "{message:?}"
        );
        assert_eq!(message.in_use.is_some(), in_use.is_some(), "{line}");
        assert!(in_use.is_none_or(|in_use| is_near(message.in_use, in_use)));
        assert!(!message.is_fragmented());
    }
}

#[test]
fn every_other_speaker_is_told_apart() {
    for (line, source) in [
        (
            "RuntimeError: MPS backend out of memory (MPS allocated: 17.87 GB, other allocations: 1.01 GB, max allowed: 18.13 GB). Tried to allocate 256.00 MB on private pool.",
            Source::Mps,
        ),
        ("RuntimeError: CUDA error: out of memory", Source::Cuda),
        ("cuda runtime: CUDA_ERROR_OUT_OF_MEMORY", Source::Cuda),
        (
            "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            Source::Library,
        ),
        ("NCCL WARN Cuda failure 'out of memory'", Source::Library),
        ("NCCL WARN Cuda failure 2 'out of memory'", Source::Library),
        ("RuntimeError: DataLoader worker (pid 1234) is killed by signal: Killed.", Source::Launcher),
        (
            "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).\nRuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory.",
            Source::SharedMemory,
        ),
        (
            "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4294967296 bytes.",
            Source::Xla,
        ),
        (
            "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 4096.00 MiB on device 0: cudaMalloc failed: out of memory",
            Source::LlamaCpp,
        ),
        (
            "RuntimeError: [enforce fail at alloc_cpu.cpp:114] data. DefaultCPUAllocator: can't allocate memory: you tried to allocate 4294967296 bytes. Error code 12",
            Source::HostAllocator,
        ),
        (
            "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 4.00 GiB for an array",
            Source::HostAllocator,
        ),
        (
            "[123.4] Out of memory: Killed process 4711 (python3) total-vm:99999999kB, anon-rss:61000000kB, file-rss:1024kB, shmem-rss:0kB, UID:0",
            Source::Kernel,
        ),
        (
            "[123.4] Memory cgroup out of memory: Killed process 4711 (pt_main_thread) total-vm:99999999kB, anon-rss:61000000kB",
            Source::Cgroup,
        ),
        ("      Reason:       OOMKilled", Source::Kubernetes),
        (
            "slurmstepd: error: Detected 1 oom_kill event in StepId=77.0. Some of the step tasks have been OOM Killed.",
            Source::Slurm,
        ),
        ("[ERROR] [launch.py:321:sigkill_handler] [...] exits with return code = -9", Source::Launcher),
        ("  exitcode  : -9 (pid: 4711)", Source::Launcher),
    ] {
        let found = of(line);
        assert_eq!(found.message.source, source, "{line}");
        assert!(!found.meaning.is_empty() && !found.remedies.is_empty(), "{line}");
        let four = [Source::Xla, Source::LlamaCpp, Source::HostAllocator].contains(&source);
        assert!(!four || found.message.tried == Some(4 * GIB), "{line}: {:?}", found.message);
    }
    let kernel =
        of("Out of memory: Killed process 4711 (python3) total-vm:9kB, anon-rss:2048kB, file-rss:1024kB")
            .message;
    assert_eq!((kernel.process.as_deref(), kernel.in_use), (Some("python3"), Some(3 << 20)));
    for line in ["", "loss 1.2", "the exit code was 0", "memory: 80% used", "we ran out of memory last year"]
    {
        assert_eq!(diagnose(&mut line.as_bytes()).unwrap(), None, "{line}");
    }
}

/// Of a device's memory the message may say what this process has: then the rest is told apart.
#[test]
fn what_others_hold_is_told_from_what_this_process_holds() {
    let after = |middle: &str| {
        of(&format!(
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 80.00 GiB of which \
             400.00 MiB is free. {middle}Of the allocated memory 72.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but \
             unallocated."
        ))
    };
    let alone = after("Including non-PyTorch memory, this process has 79.00 GiB memory in use. ");
    assert!(is_near(alone.message.outside(), 6 * GIB) && alone.message.others().unwrap() < GIB, "{alone:?}");
    let said = alone.meaning.join("\n");
    assert!(
        said.contains("this process holds 6.00 GiB outside") && !said.contains("other processes"),
        "{said}"
    );
    assert!(!alone.remedies[0].what.contains("other processes"));
    let beside = after(
        "Process 12 has 5.00 GiB memory in use. Including non-PyTorch memory, this process has 74.00 GiB memory in use. ",
    );
    assert!(is_near(beside.message.in_use, 74 * GIB), "{beside:?}");
    assert!(beside.meaning.iter().any(|text| text.starts_with("other processes hold 5.")), "{beside:?}");
    assert!(beside.remedies[0].what.contains("other processes"));
    let limited = after("8.00 GiB allowed; ");
    assert_eq!(limited.message.allowed, Some(8 * GIB));
    assert!(limited.remedies[0].what.contains("fraction"), "{limited:?}");
}

#[test]
fn more_that_is_free_than_was_asked_for_is_noticed_and_what_the_log_does_not_say_is_not_said() {
    let found = of(
        "RuntimeError: CUDA out of memory. Tried to allocate 12.50 MiB (GPU 0; 10.92 GiB total capacity; 8.57 MiB already allocated; 9.28 GiB free; 4.68 MiB cached)",
    );
    assert!(found.message.was_free());
    let said = found.meaning.join("\n");
    assert!(said.contains("more was free") && said.contains("does not say when"), "{said}");
    assert!(!said.contains("every step would be"), "{said}");
}

/// Apple's sizes are of 1024, whatever they are called.
#[test]
fn an_apple_gpu_has_the_memory_that_it_says() {
    let line = "RuntimeError: MPS backend out of memory (MPS allocated: 17.00 GB, other allocations: 1.00 GB, max allowed: 18.00 GB). Tried to allocate 256.00 MB on private pool.";
    let message = of(line).message;
    assert_eq!(message.tried, Some(256 * MIB));
    assert_eq!([message.allocated, message.total, message.in_use], [17, 18, 18].map(|n| Some(n * GIB)));
    assert_eq!(message.outside(), Some(GIB));
}

fn torch_after(before: &str) -> Diagnosis {
    of(&format!(
        "{before}\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 has a total capacity of 23.69 GiB of which 10.00 MiB is free. Of the allocated memory 23.00 GiB is allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated."
    ))
}

#[test]
fn the_traceback_says_where_it_was_and_the_progress_when() {
    let traceback = |frames: &str| format!("Traceback (most recent call last):\n{frames}");
    for (before, moment, step, said) in [
        ("  0%|          | 0/400 [00:00<?, ?it/s]\n", Moment::Backward, Some(0), "in the first step"),
        (
            "  3%|▎         | 12/400 [00:31<16:12,  2.5s/it]\n",
            Moment::Backward,
            Some(12),
            "after steps that fitted",
        ),
        ("step 7: loss 2.1\n", Moment::Backward, Some(7), "after steps that fitted"),
    ] {
        let log = before.to_owned()
            + &traceback("  File \"trainer.py\", in training_step\n  File \"_tensor.py\", in backward\n");
        let found = torch_after(&log);
        assert_eq!((found.scene.moment, found.scene.step), (moment, step), "{before}");
        assert!(found.meaning.iter().any(|text| text.starts_with(said)), "{:?}", found.meaning);
    }
    for (frames, moment, said) in [
        (
            "  File \"modeling_utils.py\", in from_pretrained\n  File \"m.py\", in forward\n",
            Moment::Loading,
            "weights alone",
        ),
        (
            "  File \"trainer.py\", in evaluation_loop\n  File \"m.py\", in forward\n",
            Moment::Evaluation,
            "training fits",
        ),
        (
            "  File \"torch/optim/adamw.py\", line 9, in step\n  File \"torch/optim/adamw.py\", in _init_group\n",
            Moment::Update,
            "8 bytes a parameter",
        ),
        ("  File \"engine.py\", in save_checkpoint\n", Moment::Saving, "comes on top"),
    ] {
        let found = torch_after(&traceback(frames));
        assert_eq!(found.scene.moment, moment, "{frames}");
        assert!(found.meaning.iter().any(|text| text.contains(said)), "{:?}", found.meaning);
    }
    let attention = torch_after(&traceback(
        "  File \"m.py\", in forward\n    attn_weights = nn.functional.softmax(attn_weights, dim=-1)",
    ));
    assert!(attention.scene.attention && attention.remedies[0].what == "flash attention");
    let logits = torch_after(&traceback(
        "  File \"m.py\", in forward\n    loss = F.cross_entropy(logits.view(-1, v), labels)",
    ));
    assert!(logits.scene.logits);
    // An older traceback is none of this message's.
    let older =
        torch_after(&(traceback("in from_pretrained\nValueError: no\n") + &traceback("in backward\n")));
    assert_eq!(older.scene.moment, Moment::Backward);
}

#[test]
fn pieces_other_processes_and_several_ranks_are_named() {
    let fragmented = of(
        "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 24.00 GiB of which 0.50 GiB is free. Of the allocated memory 18.00 GiB is allocated by PyTorch, and 5.00 GiB is reserved by PyTorch but unallocated.",
    );
    assert!(fragmented.message.is_fragmented());
    assert!(fragmented.remedies[0].what.contains("expandable_segments"));
    let others = of(
        "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 24.00 GiB of which 0.50 GiB is free. Of the allocated memory 9.00 GiB is allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated.",
    );
    assert!(others.message.others().unwrap() > 14 * GIB && others.remedies[0].what.contains("nvidia-smi"));
    let huge = of(
        "CUDA out of memory. Tried to allocate 96.00 GiB. GPU 0 has a total capacity of 24.00 GiB of which 20.00 GiB is free.",
    );
    assert!(huge.meaning.iter().any(|text| text.contains("one tensor alone")), "{:?}", huge.meaning);
    let both = of(
        "[rank0]: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has x\n[rank1]: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 1 has x\n",
    );
    assert_eq!((both.devices.clone(), both.messages, both.scene.ranks, both.line), (vec![0, 1], 2, 2, 1));
    assert!(both.meaning.iter().any(|text| text.contains("more of them do not help")));
    // A launcher speaks last, or first; what the process says counts.
    let killed = of(
        "exits with return code = -9\nMemory cgroup out of memory: Killed process 1 (python) anon-rss:1kB\n",
    );
    assert_eq!((killed.message.source, killed.line), (Source::Cgroup, 2));
}

/// Logs are of any length, in any encoding, and their numbers of any size.
#[test]
fn hostile_logs_are_read_to_their_end() {
    let mut long = vec![b'x'; 3 << 20];
    long.extend_from_slice(b"\n\xff\xfe\rCUDA error: out of memory");
    assert_eq!(diagnose(&mut &long[..]).unwrap().unwrap().line, 3);
    for line in [
        "CUDA out of memory. Tried to allocate",
        "CUDA out of memory. Tried to allocate 99999999999999999999999 GiB (GPU 99999999999999; 1e9 GiB total capacity;",
        "CUDA out of memory. Tried to allocate . GiB (GPU ;  total capacity; already allocated;  free;  reserved in total by PyTorch)",
        "ut of memory: Killed process anon-rss:99999999999999999999kB (",
        "CUDA out of memory. Tried to allocate é GiB total capacity",
    ] {
        assert_eq!(of(line).messages, 1, "{line}");
    }
}

/// A message counts wherever it stands in a line, whole and once.
#[test]
fn a_message_is_found_anywhere_in_a_long_line() {
    let message = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 24.00 GiB of which 1.00 GiB is free. Of the allocated memory 20.00 GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated.";
    let near = (12_000..16_600).step_by(97);
    for before in near.chain([0, 1 << 14, 20_000, 28_600, 28_672, 1 << 20]) {
        for behind in ["\n", &"y".repeat(20_000)] {
            let found = of(&format!("first\n{}{message}{behind}", "x".repeat(before)));
            let Diagnosis { message, line, messages, .. } = found;
            assert_eq!((line, messages, message.device), (2, 1, Some(1)), "{before}");
            assert_eq!((message.tried, message.allocated), (Some(2 * GIB), Some(20 * GIB)), "{before}");
            assert_eq!(message.unallocated, Some(512 * MIB), "{before}");
        }
    }
    // What says most counts, and of these the first.
    let (other, far) = (message.replace("2.00 GiB", "3.00 GiB"), "z".repeat(1 << 16));
    let found = of(&format!("{far} exits with return code = -9 {far} {message} {far} {other}"));
    assert_eq!((found.messages, found.message.tried), (1, Some(2 * GIB)));
}
