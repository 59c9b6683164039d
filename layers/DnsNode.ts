// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The DNS through the resolver of Node (c-ares), with a cache and bounds around it. Touches the
 * network: UDP and, where an answer is cut short, TCP to the name servers.
 */
import { Resolver } from "node:dns/promises"
import * as Clock from "effect/Clock"
import * as Deferred from "effect/Deferred"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Layer from "effect/Layer"
import * as Option from "effect/Option"
import * as Semaphore from "effect/Semaphore"
import { Dns, DnsError, isName } from "../src/services/Dns.ts"
import type { RecordType } from "../src/services/Dns.ts"
import * as DnsCache from "./DnsCache.ts"

export interface Options {
  /** `192.0.2.53`, `192.0.2.53:5353`, `[2001:db8::1]:53`; none = those of the system. */
  readonly servers: ReadonlyArray<string>
  /** Longest time one question may take its asker; 5 s unless given. */
  readonly timeout?: Duration.Duration
  /** Bounds of the cache; 20,000 entries and 16 MiB unless given. */
  readonly cache?: DnsCache.Bounds
  /** Questions on the wire at once; 256 unless given, far below what c-ares has ports for. */
  readonly inFlight?: number
}

/** Questions that wait for the wire; what comes on top is trouble at once, not memory. */
const maxWaiting = 4096

/** Node tells a TTL for addresses only; what it hides is kept for these times. */
const keepOthers = Duration.toMillis("5 minutes")
/** RFC 2308 section 5 allows 3 hours; a record that was just published should be seen soon. */
const keepAbsence = Duration.toMillis("1 minute")
/** A TTL of 0 still serves the messages of one burst; a day is too long to be wrong. */
const keepAddress = { least: 1_000, most: Duration.toMillis("1 hour") }

/** Records with the time they may be kept, in milliseconds. */
interface Found {
  readonly records: ReadonlyArray<string>
  readonly keep: number
}

interface Address {
  readonly address: string
  readonly ttl: number
}

const addresses = (answers: ReadonlyArray<Address>): Found => {
  const ttl = Math.min(...answers.map((answer) => answer.ttl * 1000), keepAddress.most)
  return { records: answers.map(({ address }) => address), keep: Math.max(ttl, keepAddress.least) }
}

const others = (records: ReadonlyArray<string>): Found => ({ records, keep: keepOthers })

const questions: {
  readonly [T in RecordType]: (resolver: Resolver, name: string) => Promise<Found>
} = {
  A: (resolver, name) => resolver.resolve4(name, { ttl: true }).then(addresses),
  AAAA: (resolver, name) => resolver.resolve6(name, { ttl: true }).then(addresses),
  // RFC 1035 section 3.3.14 leaves the strings of one record apart, RFC 7208 section 3.3 and
  // RFC 6376 section 3.6.2.2 join them without a blank.
  TXT: (resolver, name) =>
    resolver.resolveTxt(name).then((rows) => others(rows.map((row) => row.join("")))),
  MX: (resolver, name) =>
    resolver
      .resolveMx(name)
      .then((rows) => others(rows.map(({ exchange, priority }) => `${priority} ${exchange}`))),
  PTR: (resolver, name) => resolver.resolvePtr(name).then(others),
  CNAME: (resolver, name) => resolver.resolveCname(name).then(others)
}

type Detail = NonNullable<DnsError["detail"]>

/** Codes of c-ares that are true answers or no questions; every other is trouble. */
const details: { readonly [code: string]: Detail } = {
  ENOTFOUND: "nxdomain",
  ENODATA: "nodata",
  EBADNAME: "name",
  ETIMEOUT: "timeout"
}

interface Question {
  readonly name: string
  readonly type: RecordType
}

const failure = ({ name, type }: Question, detail: Detail, cause?: unknown): DnsError =>
  new DnsError({
    reason: detail === "timeout" || detail === "server" ? "trouble" : "absent",
    detail,
    name,
    type,
    cause
  })

const detailOf = (cause: unknown): Detail =>
  details[(cause as { readonly code?: string }).code ?? ""] ?? "server"

const ask = (resolver: Resolver, question: Question): Effect.Effect<Found, DnsError> =>
  Effect.tryPromise({
    try: () => questions[question.type](resolver, question.name),
    catch: (cause) => failure(question, detailOf(cause), cause)
  }).pipe(
    Effect.filterOrFail(
      (found) => found.records.length > 0,
      () => failure(question, "nodata")
    )
  )

const make = Effect.fnUntraced(function* (options: Options) {
  const timeout = Duration.toMillis(options.timeout ?? "5 seconds")
  const scope = yield* Effect.scope
  const resolver = yield* Effect.acquireRelease(
    Effect.sync(() => new Resolver({ timeout: timeout / 2, maxTimeout: timeout / 2, tries: 2 })),
    // What is asked and not answered would keep the process.
    (held) => Effect.sync(() => held.cancel())
  )
  if (options.servers.length > 0) resolver.setServers(options.servers)
  const cache = DnsCache.make(options.cache ?? { entries: 20_000, octets: 16 * 1024 * 1024 })
  const wire = Semaphore.makeUnsafe(options.inFlight ?? 256)
  const waiting = new Map<string, Deferred.Deferred<ReadonlyArray<string>, DnsError>>()

  // Trouble is not kept: the next message asks again.
  const remember = (key: string, exit: Exit.Exit<Found, DnsError>, now: number) => {
    const answer: DnsCache.Answer = Exit.map(exit, ({ records }) => records)
    const failed = Option.getOrUndefined(Exit.findErrorOption(exit))
    const isTrue = Exit.isSuccess(exit) || failed?.reason === "absent"
    const keep = Exit.isSuccess(exit) ? exit.value.keep : keepAbsence
    if (isTrue) cache.set(key, { answer, until: now + keep })
    return answer
  }

  const asking = Effect.fnUntraced(function* (key: string, question: Question) {
    const exit = yield* Effect.exit(Semaphore.withPermit(wire, ask(resolver, question)))
    return yield* remember(key, exit, yield* Clock.currentTimeMillis)
  })

  // The question belongs to the layer, not to the first asker: who gives up takes nobody's answer.
  const asked = Effect.fnUntraced(function* (key: string, question: Question) {
    const same = waiting.get(key)
    if (same !== undefined) return same
    if (waiting.size >= maxWaiting) return yield* failure(question, "server", "too many wait")
    const answer = Deferred.makeUnsafe<ReadonlyArray<string>, DnsError>()
    waiting.set(key, answer)
    yield* asking(key, question).pipe(
      Effect.ensuring(Effect.sync(() => waiting.delete(key))),
      Deferred.into(answer),
      Effect.forkIn(scope)
    )
    return answer
  })

  const resolve = Effect.fnUntraced(function* (name: string, type: RecordType) {
    const question = { name, type }
    if (!isName(name)) return yield* failure(question, "name")
    const key = `${type} ${name.toLowerCase().replace(/\.$/, "")}`
    const known = cache.get(key, yield* Clock.currentTimeMillis)
    if (known !== undefined) return yield* known
    const answer = yield* asked(key, question)
    return yield* Deferred.await(answer).pipe(
      Effect.timeoutOrElse({
        duration: timeout,
        orElse: () => Effect.fail(failure(question, "timeout"))
      })
    )
  })

  return Dns.of({ resolve })
})

/** The DNS as the system or `options.servers` see it. */
export const DnsNode = (options: Options): Layer.Layer<Dns> => Layer.effect(Dns, make(options))
