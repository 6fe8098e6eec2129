; The compiled part of the runtime: the thread pool and the walker over a table of kernel calls. A template: `walker.py`
; fills in the machine's triple, its intrinsics and the sizes, and mirrors the structs below with ctypes.
target triple = "$triple"

%Slot = type { i32, i32, i32, [13 x i32] }               ; of one thread: jobs given to it; is it asleep; does it share
                                                         ; its core
%Pool = type { i64, [7 x i64],                           ;  0 busy: 1 while a job has the workers
               i32, i32, [14 x i32],                     ;  2 arrivals at this job's barriers  3 threads asleep in one
               ptr, i64, i64, i64,                       ;  5 job  6 its threads  7 stop  8 workers
               ptr, ptr, ptr, i64,                       ;  9 syscall 10 sched_yield 11 clock_gettime 12 number of futex
               i64, i64, i64, i64, [4 x i64],            ; 13, 14 an idle worker's spins and yields 15, 16 a barrier's
               [$max_threads x %Slot] }                  ; 18 slots (number 0: the caller's)
%Job = type { ptr, i64, ptr, ptr, i64, i64, i64, ptr }   ; 0 records 1 their number 2 bases 3 scratch 4 bytes of it
                                                         ; a thread 5 threads 6 most arguments 7 times (null: none)
%Record = type { ptr, i64, i64, ptr }                    ; 0 kernel 1 parallel extent 2 arguments 3 the arguments; or
                                                         ; 0 null   1 iterations      2 records in the loop
%Argument = type { i64, i64, i64 }                       ; 0 number of its base 1 offset 2 step of an iteration

$intrinsics

; Thread `tid` waits until *word reaches target (modulo 2^32): it spins, then yields its core, then sleeps. word[1] counts
; the sleepers. If the first yield brings what spinning did not, the thread waited for is on the same core: the next wait
; spins an eighth as long.
define internal void @wait_until(ptr %pool, i64 %tid, ptr %word, i32 %target, i64 %most_spins, i64 %yields) {
entry:
  %shares.p = getelementptr %Pool, ptr %pool, i64 0, i32 18, i64 %tid, i32 2
  %shares = load i32, ptr %shares.p
  %is_sharing = icmp ne i32 %shares, 0
  %few_spins = lshr i64 %most_spins, 3
  %spins = select i1 %is_sharing, i64 %few_spins, i64 %most_spins
  %yield.p = getelementptr %Pool, ptr %pool, i64 0, i32 10
  %sched_yield = load ptr, ptr %yield.p
  %syscall.p = getelementptr %Pool, ptr %pool, i64 0, i32 9
  %syscall = load ptr, ptr %syscall.p
  %futex.p = getelementptr %Pool, ptr %pool, i64 0, i32 12
  %futex = load i64, ptr %futex.p
  %sleepers = getelementptr i32, ptr %word, i64 1
  %budget = add i64 %spins, %yields
  br label %look
look:
  %n = phi i64 [ 0, %entry ], [ %n.next, %spin ], [ %n.next, %yield ]
  %seen = load atomic i32, ptr %word acquire, align 4
  %ahead = sub i32 %seen, %target
  %reached = icmp sge i32 %ahead, 0
  br i1 %reached, label %note, label %still
note:
  %yielded = sub i64 %n, %spins
  %once = icmp eq i64 %yielded, 1
  %once.32 = zext i1 %once to i32
  store i32 %once.32, ptr %shares.p
  ret void
still:
  %n.next = add i64 %n, 1
  %spinning = icmp ult i64 %n, %spins
  br i1 %spinning, label %spin, label %tired
spin:
  call void @relax()
  br label %look
tired:
  %yielding = icmp ult i64 %n, %budget
  br i1 %yielding, label %yield, label %sleep
yield:
  %ignored = call i32 %sched_yield()
  br label %look
sleep:
  %before = atomicrmw add ptr %sleepers, i32 1 seq_cst
  %now = load atomic i32, ptr %word seq_cst, align 4
  %now.ahead = sub i32 %now, %target
  %now.reached = icmp sge i32 %now.ahead, 0
  br i1 %now.reached, label %awake, label %doze
doze: ; FUTEX_WAIT_PRIVATE: returns at once if *word is no longer `now`
  %slept = call i64 (i64, ...) %syscall(i64 %futex, ptr %word, i32 128, i32 %now, ptr null, ptr null, i32 0)
  br label %awake
awake:
  %after = atomicrmw sub ptr %sleepers, i32 1 seq_cst
  %woken = load atomic i32, ptr %word acquire, align 4
  %woken.ahead = sub i32 %woken, %target
  %woken.reached = icmp sge i32 %woken.ahead, 0
  br i1 %woken.reached, label %done, label %sleep
done:
  ret void
}

; Wakes who sleeps in wait_until(word); call it after the word's change.
define internal void @wake(ptr %pool, ptr %word) {
  %sleepers.p = getelementptr i32, ptr %word, i64 1
  %sleepers = load atomic i32, ptr %sleepers.p seq_cst, align 4
  %none = icmp eq i32 %sleepers, 0
  br i1 %none, label %done, label %call
call: ; FUTEX_WAKE_PRIVATE, everybody
  %syscall.p = getelementptr %Pool, ptr %pool, i64 0, i32 9
  %syscall = load ptr, ptr %syscall.p
  %futex.p = getelementptr %Pool, ptr %pool, i64 0, i32 12
  %futex = load i64, ptr %futex.p
  %woken = call i64 (i64, ...) %syscall(i64 %futex, ptr %word, i32 129, i32 2147483647, ptr null, ptr null, i32 0)
  br label %done
done:
  ret void
}

; Counts an arrival; the one that brings the count to target wakes the sleepers. True for that one.
define internal i1 @arrive(ptr %pool, i32 %target) {
  %arrived = getelementptr %Pool, ptr %pool, i64 0, i32 2
  %before = atomicrmw add ptr %arrived, i32 1 seq_cst
  %now = add i32 %before, 1
  %last = icmp eq i32 %now, %target
  br i1 %last, label %wake, label %done
wake:
  call void @wake(ptr %pool, ptr %arrived)
  br label %done
done:
  ret i1 %last
}

define internal void @wait_arrivals(ptr %pool, i64 %tid, i32 %target) {
  %arrived = getelementptr %Pool, ptr %pool, i64 0, i32 2
  %spins.p = getelementptr %Pool, ptr %pool, i64 0, i32 15
  %spins = load i64, ptr %spins.p
  %yields.p = getelementptr %Pool, ptr %pool, i64 0, i32 16
  %yields = load i64, ptr %yields.p
  call void @wait_until(ptr %pool, i64 %tid, ptr %arrived, i32 %target, i64 %spins, i64 %yields)
  ret void
}

define internal void @barrier(ptr %pool, i64 %tid, i32 %target) {
  %last = call i1 @arrive(ptr %pool, i32 %target)
  br i1 %last, label %done, label %wait
wait:
  call void @wait_arrivals(ptr %pool, i64 %tid, i32 %target)
  br label %done
done:
  ret void
}

; CLOCK_MONOTONIC in nanoseconds.
define internal i64 @clock(ptr %pool) {
  %time = alloca [2 x i64]
  %gettime.p = getelementptr %Pool, ptr %pool, i64 0, i32 11
  %gettime = load ptr, ptr %gettime.p
  %ignored = call i32 %gettime(i32 1, ptr %time)
  %seconds = load i64, ptr %time
  %nanoseconds.p = getelementptr i64, ptr %time, i64 1
  %nanoseconds = load i64, ptr %nanoseconds.p
  %scaled = mul i64 %seconds, 1000000000
  %now = add i64 %scaled, %nanoseconds
  ret i64 %now
}

; Charges the time since *since to times[*charged], and starts charging `next`.
define internal void @charge(ptr %pool, ptr %times, ptr %charged, ptr %since, i64 %next) {
  %now = call i64 @clock(ptr %pool)
  %start = load i64, ptr %since
  %passed = sub i64 %now, %start
  %old = load i64, ptr %charged
  %cell = getelementptr i64, ptr %times, i64 %old
  %sum = load i64, ptr %cell
  %new = add i64 %sum, %passed
  store i64 %new, ptr %cell
  store i64 %now, ptr %since
  store i64 %next, ptr %charged
  ret void
}

; Thread `tid` of `threads` walks a job's table. All threads take the same way through it: a parallel call is shared
; out evenly, thread 0 alone runs a serial one, and a barrier stands between two calls unless both are serial. Thread 0
; comes back when all the others are done with the job.
define internal void @walk(ptr %pool, ptr %job, i64 %tid, i64 %threads) {
entry:
  %records.p = getelementptr %Job, ptr %job, i64 0, i32 0
  %records = load ptr, ptr %records.p
  %count.p = getelementptr %Job, ptr %job, i64 0, i32 1
  %count = load i64, ptr %count.p
  %bases.p = getelementptr %Job, ptr %job, i64 0, i32 2
  %bases = load ptr, ptr %bases.p
  %all_scratch.p = getelementptr %Job, ptr %job, i64 0, i32 3
  %all_scratch = load ptr, ptr %all_scratch.p
  %stride.p = getelementptr %Job, ptr %job, i64 0, i32 4
  %stride = load i64, ptr %stride.p
  %my_scratch = mul i64 %stride, %tid
  %scratch = getelementptr i8, ptr %all_scratch, i64 %my_scratch
  %most.p = getelementptr %Job, ptr %job, i64 0, i32 6
  %most = load i64, ptr %most.p
  %pointers = alloca ptr, i64 %most
  %times.p = getelementptr %Job, ptr %job, i64 0, i32 7
  %times = load ptr, ptr %times.p
  %has_times = icmp ne ptr %times, null
  %is_first = icmp eq i64 %tid, 0
  %timing = and i1 %has_times, %is_first
  %team = icmp ugt i64 %threads, 1
  %threads.32 = trunc i64 %threads to i32
  %index = alloca i64            ; of the next record
  store i64 0, ptr %index
  %first = alloca i64            ; the loop we are in: its first record, the record after it (-1: no loop),
  %end = alloca i64
  store i64 -1, ptr %end
  %iterations = alloca i64       ; its iterations, and which one this is
  %iteration = alloca i64
  store i64 0, ptr %iteration
  %previous = alloca i64         ; kind of the last call: 0 none yet, 1 serial, 2 parallel
  store i64 0, ptr %previous
  %target = alloca i32           ; arrivals at the last barrier passed
  store i32 0, ptr %target
  %charged = alloca i64          ; times[0] takes what lies before the first call; times[i + 1] is record i's
  store i64 0, ptr %charged
  %since = alloca i64
  br i1 %timing, label %start_clock, label %next
start_clock:
  %start = call i64 @clock(ptr %pool)
  store i64 %start, ptr %since
  br label %next

next:
  %i = load i64, ptr %index
  %more = icmp ult i64 %i, %count
  br i1 %more, label %fetch, label %finish
fetch:
  %record = getelementptr %Record, ptr %records, i64 %i
  %kernel = load ptr, ptr %record
  %extent.p = getelementptr %Record, ptr %record, i64 0, i32 1
  %extent = load i64, ptr %extent.p
  %size.p = getelementptr %Record, ptr %record, i64 0, i32 2
  %size = load i64, ptr %size.p
  %i.next = add i64 %i, 1
  %is_loop = icmp eq ptr %kernel, null
  br i1 %is_loop, label %loop, label %call
loop:
  %loop.end = add i64 %i.next, %size
  store i64 %i.next, ptr %first
  store i64 %loop.end, ptr %end
  store i64 %extent, ptr %iterations
  store i64 0, ptr %iteration
  store i64 %i.next, ptr %index
  br label %next

call:
  %serial = icmp eq i64 %extent, 1
  %kind = select i1 %serial, i64 1, i64 2
  %kind.before = load i64, ptr %previous
  store i64 %kind, ptr %previous
  %kinds = or i64 %kind, %kind.before
  %any_parallel = icmp ugt i64 %kinds, 1
  %not_first = icmp ne i64 %kind.before, 0
  %ordered = and i1 %any_parallel, %not_first
  %synchronise = and i1 %ordered, %team
  br i1 %synchronise, label %sync, label %synced
sync:
  %target.old = load i32, ptr %target
  %target.new = add i32 %target.old, %threads.32
  store i32 %target.new, ptr %target
  call void @barrier(ptr %pool, i64 %tid, i32 %target.new)
  br label %synced
synced:
  br i1 %timing, label %stamp, label %share
stamp:
  call void @charge(ptr %pool, ptr %times, ptr %charged, ptr %since, i64 %i.next)
  br label %share

share:
  %begin.scaled = mul i64 %extent, %tid
  %begin.even = udiv i64 %begin.scaled, %threads
  %end.scaled = add i64 %begin.scaled, %extent
  %end.even = udiv i64 %end.scaled, %threads
  %one_or_none = zext i1 %is_first to i64
  %share.begin = select i1 %serial, i64 0, i64 %begin.even
  %share.end = select i1 %serial, i64 %one_or_none, i64 %end.even
  %has_share = icmp ult i64 %share.begin, %share.end
  br i1 %has_share, label %bind, label %advance
bind:
  %arguments.p = getelementptr %Record, ptr %record, i64 0, i32 3
  %arguments = load ptr, ptr %arguments.p
  %t = load i64, ptr %iteration
  br label %bind.look
bind.look:
  %a = phi i64 [ 0, %bind ], [ %a.next, %bind.one ]
  %bind.more = icmp ult i64 %a, %size
  br i1 %bind.more, label %bind.one, label %run
bind.one:
  %argument = getelementptr %Argument, ptr %arguments, i64 %a
  %base.index = load i64, ptr %argument
  %base.p = getelementptr ptr, ptr %bases, i64 %base.index
  %base = load ptr, ptr %base.p
  %offset.p = getelementptr %Argument, ptr %argument, i64 0, i32 1
  %offset = load i64, ptr %offset.p
  %step.p = getelementptr %Argument, ptr %argument, i64 0, i32 2
  %step = load i64, ptr %step.p
  %stepped = mul i64 %step, %t
  %displacement = add i64 %offset, %stepped
  %pointer = getelementptr i8, ptr %base, i64 %displacement
  %cell = getelementptr ptr, ptr %pointers, i64 %a
  store ptr %pointer, ptr %cell
  %a.next = add i64 %a, 1
  br label %bind.look
run:
  call void %kernel(ptr %pointers, ptr %scratch, i64 %share.begin, i64 %share.end)
  br label %advance

advance:
  %end.now = load i64, ptr %end
  %wraps = icmp eq i64 %i.next, %end.now
  br i1 %wraps, label %wrap, label %step_on
step_on:
  store i64 %i.next, ptr %index
  br label %next
wrap:
  %t.old = load i64, ptr %iteration
  %t.new = add i64 %t.old, 1
  %iterations.now = load i64, ptr %iterations
  %again = icmp ult i64 %t.new, %iterations.now
  br i1 %again, label %repeat, label %leave
repeat:
  %first.now = load i64, ptr %first
  store i64 %first.now, ptr %index
  store i64 %t.new, ptr %iteration
  br label %next
leave:
  store i64 -1, ptr %end
  store i64 0, ptr %iteration
  store i64 %i.next, ptr %index
  br label %next

finish:
  br i1 %team, label %join, label %joined
join:
  %target.last = load i32, ptr %target
  %others = sub i32 %threads.32, 1
  %target.join = add i32 %target.last, %others
  br i1 %is_first, label %join.wait, label %join.arrive
join.wait:
  call void @wait_arrivals(ptr %pool, i64 0, i32 %target.join)
  br label %joined
join.arrive: ; after this the job's memory may be gone
  %ignored = call i1 @arrive(ptr %pool, i32 %target.join)
  ret void
joined:
  br i1 %timing, label %stamp.last, label %done
stamp.last:
  call void @charge(ptr %pool, ptr %times, ptr %charged, ptr %since, i64 0)
  br label %done
done:
  ret void
}

; A worker's life: waits for jobs and takes part in them, until it is told to stop.
define void @work(ptr %pool, i64 %tid) {
entry:
  %control = call i64 @set_float_control(i64 $float_control)
  %slot = getelementptr %Pool, ptr %pool, i64 0, i32 18, i64 %tid
  %spins.p = getelementptr %Pool, ptr %pool, i64 0, i32 13
  %yields.p = getelementptr %Pool, ptr %pool, i64 0, i32 14
  %stop.p = getelementptr %Pool, ptr %pool, i64 0, i32 7
  %job.p = getelementptr %Pool, ptr %pool, i64 0, i32 5
  %threads.p = getelementptr %Pool, ptr %pool, i64 0, i32 6
  br label %wait
wait:
  %target = phi i32 [ 1, %entry ], [ %target.next, %take ]
  %spins = load i64, ptr %spins.p
  %yields = load i64, ptr %yields.p
  call void @wait_until(ptr %pool, i64 %tid, ptr %slot, i32 %target, i64 %spins, i64 %yields)
  %stop = load atomic i64, ptr %stop.p acquire, align 8
  %stopped = icmp ne i64 %stop, 0
  br i1 %stopped, label %quit, label %take
take:
  %job = load ptr, ptr %job.p
  %threads = load i64, ptr %threads.p
  call void @walk(ptr %pool, ptr %job, i64 %tid, i64 %threads)
  %target.next = add i32 %target, 1
  br label %wait
quit:
  %ignored = call i64 @set_float_control(i64 %control)
  ret void
}

; Gives workers 1 to threads - 1 one more job each.
define internal void @call_workers(ptr %pool, i64 %threads) {
entry:
  br label %look
look:
  %w = phi i64 [ 1, %entry ], [ %w.next, %called ]
  %more = icmp ult i64 %w, %threads
  br i1 %more, label %call, label %done
call:
  %slot = getelementptr %Pool, ptr %pool, i64 0, i32 18, i64 %w
  %before = atomicrmw add ptr %slot, i32 1 seq_cst
  call void @wake(ptr %pool, ptr %slot)
  br label %called
called:
  %w.next = add i64 %w, 1
  br label %look
done:
  ret void
}

define internal i1 @seize(ptr %pool) {
  %pair = cmpxchg ptr %pool, i64 0, i64 1 acq_rel monotonic
  %seized = extractvalue { i64, i1 } %pair, 1
  ret i1 %seized
}

; Runs a job on the calling thread and as many workers as it asks for and there are; on the calling thread alone if
; somebody else has the workers. Returns the number of threads.
define i64 @run(ptr %pool, ptr %job) {
  %control = call i64 @set_float_control(i64 $float_control)
  %wanted.p = getelementptr %Job, ptr %job, i64 0, i32 5
  %wanted = load i64, ptr %wanted.p
  %workers.p = getelementptr %Pool, ptr %pool, i64 0, i32 8
  %workers = load atomic i64, ptr %workers.p acquire, align 8
  %available = add i64 %workers, 1
  %fewer = icmp ult i64 %available, %wanted
  %threads = select i1 %fewer, i64 %available, i64 %wanted
  %team = icmp ugt i64 %threads, 1
  br i1 %team, label %try, label %alone
try:
  %seized = call i1 @seize(ptr %pool)
  br i1 %seized, label %fork, label %alone
fork:
  %arrived = getelementptr %Pool, ptr %pool, i64 0, i32 2
  store atomic i32 0, ptr %arrived monotonic, align 4
  %job.p = getelementptr %Pool, ptr %pool, i64 0, i32 5
  store ptr %job, ptr %job.p
  %threads.p = getelementptr %Pool, ptr %pool, i64 0, i32 6
  store i64 %threads, ptr %threads.p
  call void @call_workers(ptr %pool, i64 %threads)
  call void @walk(ptr %pool, ptr %job, i64 0, i64 %threads)
  store atomic i64 0, ptr %pool release, align 8
  br label %done
alone:
  call void @walk(ptr %pool, ptr %job, i64 0, i64 1)
  br label %done
done:
  %used = phi i64 [ %threads, %fork ], [ 1, %alone ]
  %ignored = call i64 @set_float_control(i64 %control)
  ret i64 %used
}

; Tells all workers to end. False (and nothing happens) while a job has them; later jobs run on their callers alone.
define i64 @stop(ptr %pool) {
  %seized = call i1 @seize(ptr %pool)
  br i1 %seized, label %end, label %done
end:
  %workers.p = getelementptr %Pool, ptr %pool, i64 0, i32 8
  %workers = load atomic i64, ptr %workers.p acquire, align 8
  store atomic i64 0, ptr %workers.p release, align 8
  %stop.p = getelementptr %Pool, ptr %pool, i64 0, i32 7
  store atomic i64 1, ptr %stop.p release, align 8
  %threads = add i64 %workers, 1
  call void @call_workers(ptr %pool, i64 %threads)
  br label %done
done:
  %result = zext i1 %seized to i64
  ret i64 %result
}

; Pauses so often: what one costs is measured with it.
define void @spin(i64 %pauses) {
entry:
  br label %look
look:
  %n = phi i64 [ 0, %entry ], [ %n.next, %pause ]
  %more = icmp ult i64 %n, %pauses
  br i1 %more, label %pause, label %done
pause:
  call void @relax()
  %n.next = add i64 %n, 1
  br label %look
done:
  ret void
}
