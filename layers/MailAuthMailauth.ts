// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * Mail authentication by the library mailauth: SPF (RFC 7208), DKIM (RFC 6376, 8301, 8463), DMARC
 * (RFC 9989), ARC (RFC 8617). Touches the service Dns and the key file of the seal.
 */
import { isIP } from "node:net"
import * as Clock from "effect/Clock"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Result from "effect/Result"
import * as AuthResults from "../src/mail/AuthResults.ts"
import * as Author from "../src/mail/Author.ts"
import { Dns } from "../src/services/Dns.ts"
import { MailAuth, SealError } from "../src/services/MailAuth.ts"
import type { Arrival, Limits, Seal, Verified } from "../src/services/MailAuth.ts"
import * as Findings from "./MailAuthFindings.ts"
import * as Guard from "./MailAuthGuard.ts"
import * as MailAuthLibrary from "./MailAuthLibrary.ts"
import type { Dmarc, Library, LibraryError } from "./MailAuthLibrary.ts"
import * as MailAuthResolver from "./MailAuthResolver.ts"
import type { Lookups } from "./MailAuthResolver.ts"
import * as SealKey from "./SealKey.ts"

export interface Options {
  /** [pepsi] HOSTNAME. */
  readonly hostname: string
  /** [pepsi] AUTHSERV_ID; HOSTNAME unless given. */
  readonly authservId?: string | undefined
  /** Where keys of our own are kept; made when it is first needed. */
  readonly keyDirectory: string
}

/**
 * What ARC-Message-Signature covers (RFC 8617 section 4.1.2): what a reader sees and a forwarder
 * has no reason to change, each as often as it is there.
 */
const signedFields = [
  "From",
  "Sender",
  "Reply-To",
  "Subject",
  "Date",
  "Message-ID",
  "To",
  "Cc",
  "MIME-Version",
  "Content-Type",
  "Content-Transfer-Encoding",
  "In-Reply-To",
  "References",
  "List-Id",
  "List-Help",
  "List-Unsubscribe",
  "List-Unsubscribe-Post",
  "List-Subscribe",
  "List-Post",
  "List-Owner",
  "List-Archive",
  "Autocrypt",
  "DKIM-Signature"
].join(":")

/** One message on its way through the checks. */
interface Case {
  readonly arrival: Arrival
  readonly limits: Limits
  readonly library: Library
  readonly lookups: Lookups
}

/** RFC 5321 section 4.1.3 writes an address as a name in brackets. */
const heloOf = ({ helo, ip }: NonNullable<Arrival["client"]>): string =>
  helo === "" || isIP(helo) !== 0 ? `[${helo === "" ? ip : helo}]` : helo

/**
 * A message that makes the library throw proves nothing: the check fails closed, and the message
 * goes on.
 */
const instead = <B>(what: string, other: B) =>
  Effect.catch((error: LibraryError) => Effect.as(Effect.logDebug(what, error.cause), other))

const spf = (hostname: string) =>
  Effect.fnUntraced(function* ({ arrival, library, lookups }: Case) {
    const { client, sender } = arrival
    const none: Findings.Spf = { result: "none", domain: null, identity: undefined }
    if (client === undefined) return none
    // RFC 7208 section 2.4: without a reverse path the HELO identity is the one to check.
    const identity = sender === "" ? "helo" : "mailfrom"
    return yield* library
      .spf({
        ip: client.ip,
        helo: heloOf(client),
        sender,
        mta: hostname,
        resolver: lookups.spf
      })
      .pipe(
        Effect.map(
          ({ domain, status }): Findings.Spf => ({ result: status.result, domain, identity })
        ),
        instead<Findings.Spf>("SPF check threw", { ...none, result: "permerror" })
      )
  })

/** What is found of signatures and seals. */
interface Signed {
  readonly signatures: ReadonlyArray<Findings.Signature>
  readonly arc: Findings.Arc
  readonly bodyHash: string | undefined
}

/** A message whose octets the library does not get: no signature passes, no seal is made. */
const unseen = ({ arrival }: Case, claims: ReadonlyArray<Guard.Claim>, reason: string): Signed => ({
  signatures: Findings.allUnseen(claims, reason),
  arc: { ...Findings.noArc, arc: Guard.hasArc(arrival.header) ? "fail" : "none" },
  bodyHash: undefined
})

const signed = Effect.fnUntraced(function* (one: Case) {
  const {
    arrival: { body, header },
    library,
    limits,
    lookups
  } = one
  const claims = Guard.claims(one.arrival, limits.signatures)
  const reason = Guard.refusal(header, body)
  if (reason !== undefined) return unseen(one, claims, reason)
  // The library asks for one key after the other; asked ahead, they wait together.
  for (const name of Guard.keyNames(header, claims)) {
    void lookups.keys(name, "TXT").catch(() => undefined)
  }
  return yield* library
    .signatures({
      header: Guard.trim(header, claims),
      body,
      resolver: lookups.keys,
      minBitLength: limits.minRsaBits
    })
    .pipe(
      Effect.map((found): Signed => {
        const arc = Findings.arc(found)
        const isDoubtful = arc.arc === "fail" && lookups.isKeyTroubled()
        const bodyHash = isDoubtful ? undefined : found.bodyHash
        return { signatures: Findings.signatures(claims, found), arc, bodyHash }
      }),
      instead<Signed>("DKIM check threw", unseen(one, claims, "not readable"))
    )
})

/** What may speak for the author, as the library wants it. */
interface Voices {
  readonly spf: ReadonlyArray<string>
  readonly dkim: ReadonlyArray<string>
}

const silence: Voices = { spf: [], dkim: [] }

const evaluate = ({ library, lookups }: Case, author: string, voices: Voices) =>
  library.dmarc({
    // Read by our own grammar: the library sees the one domain and no syntax.
    headerFrom: [`author@${author}`],
    fromFields: 1,
    spfDomains: [...voices.spf],
    dkimDomains: voices.dkim.map((domain) => ({ domain })),
    resolver: lookups.policy
  })

/** What has passed, and what would have if every question had its answer. */
type Heard = readonly [sure: Voices, doubtful: Voices]

const voicesOf = (found: Findings.Spf, signatures: Signed["signatures"]): Heard => {
  const spoken = found.domain === null ? [] : [found.domain]
  const isSpfSure = found.result === "pass"
  const isSpfDoubtful = isSpfSure || found.result === "temperror"
  const domains = (use: (one: Findings.Signature) => boolean) =>
    signatures.filter(use).map(({ domain }) => domain)
  return [
    { spf: isSpfSure ? spoken : [], dkim: domains((one) => one.counts) },
    { spf: isSpfDoubtful ? spoken : [], dkim: domains((one) => one.counts || one.isDoubtful) }
  ]
}

interface Judged {
  readonly dmarc: Dmarc | "permerror"
  readonly isDoubtful: boolean
}

const size = ({ dkim, spf }: Voices): number => dkim.length + spf.length

const statusOf = ({ response }: Dmarc): string =>
  response === false ? "permerror" : response.status.result

const unjudged: Judged = { dmarc: "permerror", isDoubtful: false }

/**
 * RFC 9989 section 5.4 with RFC 6376 section 6.1.2 and RFC 7208 section 8.6: as long as one
 * identifier that had no answer might align, the message has not failed.
 */
const judge = Effect.fnUntraced(
  function* (one: Case, author: string, [sure, doubtful]: Heard) {
    const dmarc = yield* evaluate(one, author, sure)
    const isSure = statusOf(dmarc) !== "fail" || size(doubtful) === size(sure)
    const other = isSure ? dmarc : yield* evaluate(one, author, doubtful)
    return { dmarc, isDoubtful: !isSure && statusOf(other) !== "fail" } as Judged
  },
  instead("DMARC check threw", unjudged)
)

const verifier = (hostname: string, dns: Dns["Service"], load: Effect.Effect<Library>) => {
  const checkSpf = spf(hostname)
  return Effect.fnUntraced(function* (arrival: Arrival, limits: Limits) {
    const library = yield* load
    const lookups = yield* MailAuthResolver.make(dns, limits)
    const one: Case = { arrival, limits, library, lookups }
    const author = Result.getOrUndefined(Author.domain(arrival.header))
    // The walk of DMARC does not wait for the others; what it finds is there when they are done.
    const ahead = author === undefined ? Effect.void : Effect.ignore(evaluate(one, author, silence))
    const checks = [checkSpf(one), signed(one), ahead] as const
    const [spf, { arc, bodyHash, signatures }] = yield* Effect.all(checks, { concurrency: 3 })
    const judged =
      author === undefined ? unjudged : yield* judge(one, author, voicesOf(spf, signatures))
    const auth = Findings.join({ spf, signatures, arc, author, ...judged })
    return { auth, bodyHash } satisfies Verified
  }, Effect.scoped)
}

/** RFC 8617 section 5.1 wants no set here, or nothing could be signed: the mail goes on without. */
const noSeal = new Set(["EARCCHAINFAILED", "EINVALIDINSTANCE", "EINVALIDCV", "ENOFROM"])

const instanceOf = (fields: string): number =>
  Number(/^ARC-Seal:\s*i=(\d+)/i.exec(fields)?.[1] ?? 0)

const failed = (detail: string, cause: unknown): SealError =>
  new SealError({ reason: "library", detail, cause })

/** Milliseconds between two lines of the log: the same trouble meets every message. */
const logInterval = 60_000

/** Says what keeps us from sealing; whoever may do without a seal says nothing of it. */
const complaints = () => {
  let last = -Infinity
  return Effect.fnUntraced(function* (error: SealError) {
    const now = yield* Clock.currentTimeMillis
    if (now - last < logInterval) return
    last = now
    yield* Effect.annotateLogs(Effect.logError("no seal can be made"), { why: error.detail })
  })
}

const sealer = (keys: ReturnType<typeof SealKey.make>, load: Effect.Effect<Library>) =>
  Effect.fnUntraced(function* (seal: Seal) {
    if (Guard.refusal(seal.header, seal.body) !== undefined) return undefined
    const library = yield* load
    const privateKey = yield* keys(seal.keyFile, seal)
    const set = yield* library
      .seal({
        header: seal.header,
        body: seal.body,
        ...(seal.bodyHash === undefined ? {} : { bodyHash: seal.bodyHash }),
        cv: seal.auth.arc,
        authResults: AuthResults.value(seal.authservId, seal.auth),
        signingDomain: seal.domain,
        selector: seal.selector,
        privateKey,
        headerList: signedFields,
        signTime: new Date(yield* Clock.currentTimeMillis)
      })
      .pipe(Effect.mapError(({ cause }) => failed("the library threw", cause)))
    const cause = set.errors[0]?.err
    if (set.headers.length === 0 && noSeal.has(cause?.code ?? "")) return undefined
    // The library may make nothing and say nothing: what counts is what came out.
    if (set.headers.length !== 3) return yield* failed(cause?.message ?? "no set came out", cause)
    const fields = set.headers.map((field) => `${field}\r\n`).join("")
    return { fields, instance: instanceOf(fields) }
  }, Effect.tapError(complaints()))

const make = Effect.fnUntraced(function* (options: Options) {
  const dns = yield* Dns
  const load = yield* Effect.cached(MailAuthLibrary.load)
  return MailAuth.of({
    hostname: options.hostname,
    authservId: options.authservId ?? options.hostname,
    verify: verifier(options.hostname, dns, load),
    seal: sealer(SealKey.make(options.keyDirectory), load)
  })
})

/** Mail authentication in the name of a host. */
export const MailAuthMailauth = (options: Options): Layer.Layer<MailAuth, never, Dns> =>
  Layer.effect(MailAuth, make(options))
