// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * One row in a worker: from its first stage, through what is fused behind it, to what is settled.
 * A defect on the way, or a stage that takes longer than its TIMEOUT, is the row's own: nothing is
 * written for it, it is redone alone, and the worker ends after the others.
 */
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as EffectQueue from "effect/Queue"
import * as Random from "effect/Random"
import * as Plan from "../../pipeline/Plan.ts"
import type { Section } from "../../pipeline/Route.ts"
import * as Stage from "../../pipeline/Stage.ts"
import { fromFailure } from "../../pipeline/Verdict.ts"
import * as Wire from "../../pipeline/Wire.ts"
import type { Loaded } from "../../services/Queue.ts"
import type { Finished } from "../Settler.ts"
import { toMail, upgrade, withNeeds } from "./Loading.ts"
import type { Run, Shop } from "./Shop.ts"

/** Runs a row; `flags` as ordered. */
export const runRow = (shop: Shop, row: Loaded, flags: number): Effect.Effect<void> =>
  Effect.withFiber((fiber) =>
    runChain(shop, row, { flags, interrupt: () => fiber.interruptUnsafe() })
  ).pipe(
    Effect.catchDefect((defect) => Effect.sync(() => threw(shop, row.id, place(defect)))),
    Effect.ensuring(Effect.sync(() => shop.running.delete(row.id)))
  )

interface Order {
  readonly flags: number
  readonly interrupt: () => void
}

const runChain = Effect.fnUntraced(function* (
  shop: Shop,
  row: Loaded,
  { flags, interrupt }: Order
) {
  const { allowFusion, pipeline, section: first } = shop.assignment
  let mail = toMail(row, (flags & Wire.flags.repeat) !== 0)
  let have = first.load
  let chain = Plan.begin(mail, first, (flags & Wire.flags.alone) !== 0)
  while (true) {
    const ready = yield* makeReady(shop, chain, { mail, have })
    if (ready._tag === "Stop") return finish(shop, chain, Plan.stop(chain))
    if (ready._tag === "Gone") return gone(shop, row.id)
    mail = ready.mail
    have = Stage.maxLoad(have, chain.section.load)
    const began = shop.clock.monotonicTimeNanosUnsafe()
    const limitMillis = Duration.toMillis(chain.section.timeout)
    const running = { since: Number(began / 1_000_000n), limitMillis, interrupt }
    shop.running.set(row.id, running)
    const held = { have, patch: chain.patch }
    const result = yield* Effect.result(ready.run(withNeeds(shop.queue, mail, held)))
    // It has taken too long, and its row is somebody else's by now.
    if (shop.running.get(row.id) !== running) return
    const micros = Number((shop.clock.monotonicTimeNanosUnsafe() - began) / 1000n)
    const verdict = result._tag === "Success" ? result.success : fromFailure(result.failure)
    const ran = { verdict, micros, chance: yield* Random.next }
    const step = Plan.step(pipeline, allowFusion, chain, ran)
    if (step._tag === "Settle") {
      if (step.outcome.verdict === "fail") yield* logFailed(row.id, chain.section, step.outcome)
      return finish(shop, { ...chain, runs: step.runs }, step.outcome, step.once)
    }
    mail = Plan.patched(mail, verdict.patch, step.chain.section.name)
    chain = step.chain
  }
})

const gone = (shop: Shop, id: number): void =>
  shop.assignment.say({ t: "returned", ids: [id], why: "gone" })

/** The status alone: what a stage says beside it may name people. */
const logFailed = (id: number, { name }: Section, { error }: Finished["outcome"]) =>
  Effect.annotateLogs(Effect.logInfo("a message failed"), {
    id,
    section: name,
    status: error?.split(" ")[0]
  })

const finish = (
  shop: Shop,
  { runs, section }: Plan.Chain,
  outcome: Finished["outcome"],
  once = false
): void => {
  EffectQueue.offerUnsafe(shop.outbox, {
    outcome,
    runs,
    durable: once || section.synchronousCommit,
    alone: once
  })
}

/** Ends every stage that is at work for longer than its section's TIMEOUT. Once a second. */
export const endLate = (shop: Shop): void => {
  const now = Number(shop.clock.monotonicTimeNanosUnsafe() / 1_000_000n)
  for (const [id, { interrupt, limitMillis, since }] of shop.running) {
    if (now - since <= limitMillis) continue
    shop.running.delete(id)
    threw(shop, id, "took longer than TIMEOUT")
    interrupt()
  }
}

const threw = (shop: Shop, id: number, error: string): void => {
  shop.door.open = false
  shop.assignment.say({ t: "threw", id, section: shop.assignment.section.name, error })
}

/**
 * Where it threw: the name and the first frames, never the text, which may hold parts of a mail.
 */
const place = (error: unknown): string => {
  if (!(error instanceof Error)) return "not an Error"
  const frames = (error.stack ?? "")
    .split("\n")
    .filter((line) => /^\s+at /.test(line))
    .slice(0, 3)
  return [error.name, ...frames.map((line) => line.trim())].join(" ").slice(0, 600)
}

type Readied =
  | { readonly _tag: "Run"; readonly run: Run; readonly mail: Stage.WithBody }
  | { readonly _tag: "Stop" }
  | { readonly _tag: "Gone" }

/**
 * The stage and enough of the message for it. Trouble behind the first stage ends the chain there.
 */
const makeReady = Effect.fnUntraced(function* (
  shop: Shop,
  { patch, section }: Plan.Chain,
  { have, mail }: { readonly mail: Stage.WithBody; readonly have: Stage.Load }
) {
  const run = yield* shop.runOf(section)
  if (run === undefined) return { _tag: "Stop" } as Readied
  if (Stage.serves(have, section.load)) return { _tag: "Run", run, mail } as Readied
  const more = yield* Effect.result(upgrade(shop.queue, mail, patch, section.load))
  if (more._tag === "Failure") return { _tag: "Stop" } as Readied
  return (
    more.success === undefined ? { _tag: "Gone" } : { _tag: "Run", run, mail: more.success }
  ) as Readied
})
