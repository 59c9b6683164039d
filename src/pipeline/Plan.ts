// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * Runs of fusible stages: what a worker does after a verdict, go on in the same process or settle,
 * and what is then written.
 *
 * The law: for every message and wiring, a fused run ends in the same row, the same mail out and
 * the same counters as separate runs. So a chain goes on only after a plain pass, carries every
 * patch and write along, and never goes past a stage that has an effect outside. Pure.
 */
import type { NewMessage, Outcome } from "./Job.ts"
import { backoff, childToken } from "./Job.ts"
import type { Pipeline, Section } from "./Route.ts"
import type { Metadata, WithBody } from "./Stage.ts"
import type { Run } from "./Stats.ts"
import { mergePatch } from "./Verdict.ts"
import type { Patch, Verdict } from "./Verdict.ts"
import type { Write } from "./Writes.ts"

/** Stages one chain may have: longer than any sensible path, and an end to a loop of passes. */
export const maxChain = 16

/** What a chain carries from stage to stage. */
export interface Chain {
  readonly id: number
  readonly rev: number
  readonly token: string
  /** Deferrals at the first section so far. */
  readonly attempts: number
  readonly section: Section
  readonly moved: boolean
  readonly alone: boolean
  readonly patch: Patch
  readonly writes: ReadonlyArray<Write>
  readonly emissions: ReadonlyArray<NewMessage>
  readonly runs: ReadonlyArray<Run>
}

/** A chain before its first stage. `alone`: a row with a death runs unfused. */
export const begin = (mail: Metadata, section: Section, alone: boolean): Chain => ({
  id: mail.id,
  rev: mail.rev,
  token: mail.token,
  attempts: mail.attempts,
  section,
  moved: false,
  alone,
  patch: {},
  writes: [],
  emissions: [],
  runs: []
})

/** On with the next section, or the end of the chain. */
export type Step =
  | { readonly _tag: "Next"; readonly chain: Chain }
  | {
      readonly _tag: "Settle"
      readonly outcome: Outcome
      readonly runs: ReadonlyArray<Run>
      readonly once: boolean
    }

/** What one verdict makes of a chain. */
export interface Ran {
  readonly verdict: Verdict
  readonly micros: number
  /** 0 to 1, for the jitter of a pause. */
  readonly chance: number
}

/** Decides after a verdict. */
export const step = (pipeline: Pipeline, allowFusion: boolean, chain: Chain, ran: Ran): Step => {
  const section = chain.section
  const carried = carry(chain, ran)
  const decision = ran.verdict.decision
  const to = decision._tag === "Pass" ? (decision.to ?? section.next) : undefined
  if (decision._tag === "Pass" && to === undefined) {
    // A stage without NEXT passed: the wiring was checked for it, so this is its own bug.
    throw new Error(`[stage-${section.name}] passed without a next section`)
  }
  const next = to === undefined ? undefined : pipeline.sections.get(to)
  if (
    next !== undefined &&
    allowFusion &&
    ran.verdict.children.length === 0 &&
    mayFuse(carried, next)
  ) {
    return { _tag: "Next", chain: { ...carried, section: next, moved: true } }
  }
  return {
    _tag: "Settle",
    outcome: outcome(carried, ran, to),
    runs: carried.runs,
    once: section.stage.effect === "once"
  }
}

/** Ends a chain before its present section: the row goes there as if dispatched. */
export const stop = (chain: Chain): Outcome => ({
  id: chain.id,
  rev: chain.rev,
  verdict: "pass",
  section: chain.section.name,
  patch: chain.patch,
  writes: chain.writes,
  children: [],
  emissions: chain.emissions
})

/** Whether the chain may run into that section in this worker. */
const mayFuse = (chain: Chain, next: Section): boolean =>
  !chain.alone &&
  next.fusion &&
  next.stage.fusible &&
  chain.section.stage.effect === "none" &&
  chain.runs.length < maxChain &&
  next.user === chain.section.user &&
  next.dbRole === chain.section.dbRole

const carry = (chain: Chain, { micros, verdict }: Ran): Chain => ({
  ...chain,
  patch: mergePatch(chain.patch, verdict.patch),
  writes: [...chain.writes, ...verdict.writes],
  emissions: [
    ...chain.emissions,
    ...verdict.emissions.map(
      (emission): NewMessage => ({
        token: childToken(chain.token, chain.section.name, emission.key),
        section: emission.to,
        recipients: emission.recipients,
        patch: {
          sender: emission.sender ?? "",
          fromHeader: emission.fromHeader ?? null,
          subject: emission.subject ?? null,
          header: emission.header,
          body: emission.body,
          state: emission.state ?? {}
        },
        ...(emission.if === undefined ? {} : { if: emission.if + chain.writes.length })
      })
    )
  ],
  runs: [
    ...chain.runs,
    {
      section: chain.section.name,
      result: resultOf(verdict),
      micros,
      fused: chain.moved
    }
  ]
})

const resultOf = (verdict: Verdict): Run["result"] => results[verdict.decision._tag]
const results = {
  Pass: "pass",
  Done: "done",
  Defer: "defer",
  Park: "park",
  Fail: "fail",
  Fanout: "fanout"
} as const

const outcome = (chain: Chain, { chance, verdict }: Ran, to: string | undefined): Outcome => {
  const section = chain.section
  const decision = verdict.decision
  const base = {
    id: chain.id,
    rev: chain.rev,
    section: to ?? (chain.moved ? section.name : undefined),
    patch: chain.patch,
    writes: chain.writes,
    emissions: chain.emissions,
    children: verdict.children.map(
      (child): NewMessage => ({
        token: childToken(chain.token, section.name, child.key),
        section: child.to ?? section.next ?? section.name,
        recipients: child.recipients,
        patch: child.patch ?? {},
        ...(child.after === undefined ? {} : { after: child.after })
      })
    )
  }
  switch (decision._tag) {
    case "Pass":
      return { ...base, verdict: "pass" }
    case "Done":
      return { ...base, verdict: "done" }
    case "Fanout":
      return { ...base, verdict: "fanout" }
    case "Defer": {
      const attempts = chain.moved ? 0 : chain.attempts
      return {
        ...base,
        verdict: "defer",
        error: decision.reason,
        after: decision.after ?? backoff(attempts, chance)
      }
    }
    case "Park":
      return { ...base, verdict: "park", park: decision }
    case "Fail":
      return failed(base, section, decision)
  }
}

/** To the section's FAILURE if it has one, else to the failure-bouncer; why is in the state. */
const failed = (
  base: Omit<Outcome, "verdict">,
  section: Section,
  {
    class: failureClass,
    status,
    text
  }: { readonly class: string; readonly status: string; readonly text: string }
): Outcome => {
  const failure = { stage: section.name, class: failureClass, status, text }
  const patch = mergePatch(base.patch, { state: { failure } })
  const error = `${status} ${text}`
  return section.failure === undefined
    ? { ...base, patch, error, verdict: "fail" }
    : { ...base, patch, error, verdict: "pass", section: section.failure }
}

/** The message as the next stage of the chain sees it. */
export const patched = (mail: WithBody, patch: Patch, section: string): WithBody => {
  const headerBytes =
    patch.header === undefined ? 0 : patch.header.raw.length - mail.header.raw.length
  const bodyBytes = patch.body === undefined ? 0 : patch.body.length - mail.body.length
  return {
    ...mail,
    section,
    attempts: 0,
    repeat: mail.repeat,
    sender: patch.sender ?? mail.sender,
    recipients: patch.recipients ?? mail.recipients,
    fromHeader: patch.fromHeader === undefined ? mail.fromHeader : patch.fromHeader,
    subject: patch.subject === undefined ? mail.subject : patch.subject,
    messageId: patch.messageId === undefined ? mail.messageId : patch.messageId,
    listId: patch.listId === undefined ? mail.listId : patch.listId,
    hdrFlags: patch.hdrFlags === undefined ? mail.hdrFlags : patch.hdrFlags,
    state:
      patch.state === undefined && patch.unset === undefined
        ? mail.state
        : patchedState(mail.state, patch),
    header: patch.header ?? mail.header,
    body: patch.body ?? mail.body,
    sizeBytes: mail.sizeBytes + headerBytes + bodyBytes
  }
}

const patchedState = (state: WithBody["state"], patch: Patch): WithBody["state"] => {
  const merged: { [key: string]: unknown } = { ...state, ...patch.state }
  for (const key of patch.unset ?? []) delete merged[key]
  return merged
}
