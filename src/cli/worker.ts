// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * `pepsi worker --orders SECTION`: a stage worker under a daemon, on standard input and output.
 * Not for people: what it is to do, the configuration included, comes over the pipe.
 */
import * as Cause from "effect/Cause"
import * as Data from "effect/Data"
import * as Effect from "effect/Effect"
import * as EffectQueue from "effect/Queue"
import * as Main from "../../layers/Main.ts"
import * as Wire from "../pipeline/Wire.ts"
import { boundShutdown, codes, teardown } from "./exit.ts"

/** A stage threw; all that was begun is settled, and a new worker does the rest. */
class StageThrew extends Data.TaggedError("StageThrew")<{ readonly section: string }> {
  readonly exitCode = codes.temporary
  override readonly message = `a stage threw behind [stage-${this.section}]; a new worker goes on`
}

/** The daemon speaks another version, or is no daemon. */
class NotOurs extends Data.TaggedError("UsageError")<{ readonly message: string }> {}

type Orders = EffectQueue.Queue<Wire.Order, Wire.WireError | Cause.Done>

/** Cuts standard input into orders; ends with it. */
const readOrders = (orders: Orders): void => {
  let rest = ""
  process.stdin.setEncoding("utf8")
  process.stdin.on("data", (chunk: string) => {
    const lines = (rest + chunk).split("\n")
    rest = lines.pop() ?? ""
    for (const line of lines) {
      const order = Wire.decodeOrder(line)
      if (order._tag === "Success") EffectQueue.offerUnsafe(orders, order.success)
      else EffectQueue.failCauseUnsafe(orders, Cause.fail(order.failure))
    }
  })
  process.stdin.on("end", () => EffectQueue.endUnsafe(orders))
}

const run = Effect.fnUntraced(function* (section: string, orders: Orders) {
  const first = yield* EffectQueue.take(orders)
  if (first.t !== "setup" || first.version !== Wire.version || first.section !== section) {
    return yield* new NotOurs({ message: "worker --orders is started by 'pepsi serve' only" })
  }
  const whole = yield* Main.worker(first, {
    orders,
    say: (report) => void process.stdout.write(Wire.encode(report))
  })
  if (!whole) return yield* new StageThrew({ section })
})

/** Begun work is settled whoever tells us to end: a service manager signals workers, too. */
const endOnSignal = (orders: Orders): void => {
  for (const signal of ["SIGINT", "SIGTERM"] as const) {
    process.on(signal, () => EffectQueue.endUnsafe(orders))
  }
  boundShutdown(settleSeconds)
}

/** After a signal; then the daemon would kill us. */
const settleSeconds = 10

/** Runs until standard input ends. */
export const runWorker = (section: string): void => {
  // The daemon is gone when nobody reads the reports: its end of standard input ends us, too.
  process.stdout.on("error", () => undefined)
  const orders: Orders = Effect.runSync(
    EffectQueue.unbounded<Wire.Order, Wire.WireError | Cause.Done>()
  )
  endOnSignal(orders)
  readOrders(orders)
  const program = run(section, orders).pipe(
    Effect.annotateLogs({ worker: section }),
    Effect.catchIf(
      (error) => error._tag === "Done",
      () => Effect.void
    ),
    Effect.provide(Main.earlyLog)
  )
  // Not runMain: that interrupts at a signal, and with it what has begun.
  Effect.runFork(program).addObserver((exit) =>
    teardown(exit, (code) => process.stdout.write("", () => process.exit(code)))
  )
}
