// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * Stage workers as child processes: one program, started with `worker SECTION`, its configuration
 * and its orders on standard input, its reports on standard output, its log on our standard error.
 *
 * A worker runs in a process group of its own, so that Ctrl-C at a terminal reaches only the
 * daemon, which then ends its workers in order. It ends by itself when its input ends, so a
 * daemon that is killed leaves none behind.
 */
import { spawn } from "node:child_process"
import type { ChildProcess } from "node:child_process"
import * as Cause from "effect/Cause"
import * as Deferred from "effect/Deferred"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Queue from "effect/Queue"
import * as Wire from "../src/pipeline/Wire.ts"
import { Workers, WorkerStartError } from "../src/services/Workers.ts"
import type { Ended, Worker } from "../src/services/Workers.ts"

/** How workers are started and ended. */
export interface Settings {
  /** The program and the arguments before `worker SECTION`. */
  readonly command: readonly [string, ...Array<string>]
  /** After the end of input, how long a worker may finish what it has begun. */
  readonly grace: Duration.Duration
}

/** From SIGTERM to SIGKILL; a worker that does not answer a SIGTERM by then is stuck. */
const termGrace = Duration.seconds(10)

export const WorkersProcess = (settings: Settings): Layer.Layer<Workers> =>
  Layer.succeed(
    Workers,
    Workers.of({
      start: Effect.fnUntraced(function* (section) {
        const ended = yield* Deferred.make<Ended>()
        const reports = yield* Queue.unbounded<Wire.Report, Wire.WireError | Cause.Done>()
        const child = yield* Effect.acquireRelease(
          launch(settings.command, section, (end) =>
            Deferred.doneUnsafe(ended, Effect.succeed(end))
          ),
          (started) => stop(started, Deferred.await(ended), settings.grace)
        )
        child.stdout.setEncoding("utf8")
        readLines(child.stdout, reports)
        return handle(child, reports, Deferred.await(ended))
      })
    })
  )

type Child = ChildProcess & {
  readonly stdin: NonNullable<ChildProcess["stdin"]>
  readonly stdout: NonNullable<ChildProcess["stdout"]>
  readonly pid: number
}

const launch = (command: Settings["command"], section: string, onEnd: (ended: Ended) => void) =>
  Effect.callback<Child, WorkerStartError>((resume) => {
    const [program, ...args] = command
    const child = spawn(program, [...args, "worker", "--orders", section], {
      stdio: ["pipe", "pipe", "inherit"],
      detached: true
    })
    const failed = (cause: Error) => resume(Effect.fail(new WorkerStartError({ section, cause })))
    child.once("error", failed)
    child.once("spawn", () => {
      child.off("error", failed)
      // A kill that finds no process is no news: `ended` tells.
      child.on("error", () => undefined)
      // Writing to a worker that has just died fails with EPIPE; its end is reported by "close".
      child.stdin.on("error", () => undefined)
      resume(Effect.succeed(child as Child))
    })
    child.once("close", (code, signal) =>
      onEnd({ code: code ?? undefined, signal: signal ?? undefined })
    )
  })

/** Cuts the output into lines; a line beyond the bound fails the queue. */
const readLines = (
  output: NodeJS.ReadableStream,
  reports: Queue.Enqueue<Wire.Report, Wire.WireError | Cause.Done>
): void => {
  let rest = ""
  output.on("data", (chunk: string) => {
    const lines = (rest + chunk).split("\n")
    rest = lines.pop() ?? ""
    for (const line of lines) offer(reports, line)
    if (rest.length > Wire.maxLine) offer(reports, rest)
  })
  output.on("close", () => Queue.endUnsafe(reports))
}

const offer = (
  reports: Queue.Enqueue<Wire.Report, Wire.WireError | Cause.Done>,
  line: string
): void => {
  const report = Wire.decodeReport(line)
  if (report._tag === "Success") Queue.offerUnsafe(reports, report.success)
  else Queue.failCauseUnsafe(reports, Cause.fail(report.failure))
}

const handle = (child: Child, reports: Worker["reports"], ended: Effect.Effect<Ended>): Worker => ({
  pid: child.pid,
  send: (order) => {
    if (child.stdin.writable) child.stdin.write(Wire.encode(order))
  },
  reports,
  finish: Effect.sync(() => {
    child.stdin.end()
  }),
  kill: Effect.sync(() => {
    child.kill("SIGKILL")
  }),
  ended
})

/** End of input, then SIGTERM, then SIGKILL; returns when the process is gone. */
const stop = (child: Child, ended: Effect.Effect<Ended>, grace: Duration.Duration) =>
  Effect.sync(() => child.stdin.end()).pipe(
    Effect.andThen(within(ended, grace)),
    Effect.flatMap((gone) => (gone ? Effect.void : signal(child, "SIGTERM", ended, termGrace))),
    Effect.asVoid
  )

const signal = (
  child: Child,
  name: NodeJS.Signals,
  ended: Effect.Effect<Ended>,
  grace: Duration.Duration
) =>
  Effect.sync(() => child.kill(name)).pipe(
    Effect.andThen(within(ended, grace)),
    Effect.flatMap((gone) =>
      gone
        ? Effect.void
        : Effect.andThen(
            Effect.sync(() => child.kill("SIGKILL")),
            ended
          )
    ),
    Effect.asVoid
  )

/** Whether the process is gone within a time. */
const within = (ended: Effect.Effect<Ended>, time: Duration.Duration): Effect.Effect<boolean> =>
  ended.pipe(
    Effect.as(true),
    Effect.timeoutOrElse({ duration: time, orElse: () => Effect.succeed(false) })
  )
