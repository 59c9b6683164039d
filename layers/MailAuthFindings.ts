// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * From what the library answers to what we keep: one shape, bounded texts, and the rules of ours
 * that are stricter than the library's. Pure.
 */
import type { ARCChainEntry, DKIMResult } from "mailauth"
import * as Address from "../src/mail/Address.ts"
import type { Auth, DkimResult } from "../src/pipeline/State.ts"
import type { Dmarc, Signatures } from "./MailAuthLibrary.ts"
import type * as Guard from "./MailAuthGuard.ts"

/** Characters of a text that is kept; a domain has 253. */
const maxText = 255
const maxReason = 80
/** RSA keys above are refused: their cost grows faster than anybody's need. */
const maxRsaBits = 8192

/** A text for the state of a row: no control character, nothing JSON or PostgreSQL would refuse. */
const clip = (text: string | false | undefined, max = maxText): string =>
  (text || "")
    .replace(/\p{Cc}+/gu, " ")
    .slice(0, max)
    .toWellFormed()

/** What SPF found. */
export interface Spf {
  readonly result: string
  readonly domain: string | null
  readonly identity: "mailfrom" | "helo" | undefined
}

/** One signature, with what decides whether it may speak for the author. */
export interface Signature {
  readonly kept: Omit<DkimResult, "aligned">
  readonly domain: string
  /** It passes and covers the whole body. */
  readonly counts: boolean
  /** Its key had no answer: it might have counted. */
  readonly isDoubtful: boolean
}

type Verdict = readonly [result: string, reason: string]

const resultOf = ({ modulusLength, status }: DKIMResult): Verdict => {
  if ((modulusLength ?? 0) > maxRsaBits) return ["permerror", "key too long"]
  // RFC 6376 section 8.2: the tail behind l= is anybody's. It verifies, but vouches for nothing.
  if ((status.underSized ?? 0) > 0 && status.result === "pass") return ["pass", "unsigned tail"]
  const comment = typeof status.comment === "string" ? status.comment : ""
  if (status.result === "policy") return ["policy", comment === "" ? "weak key" : comment]
  return [status.result, status.result === "pass" ? "" : comment]
}

const canonical = (domain: string): string =>
  Address.domainToAscii(domain.replace(/\.+$/, "")) ?? ""

/** The properties the library writes into Authentication-Results. */
interface Properties {
  readonly d?: string | false
  readonly b?: string | false
}

const signature = (found: DKIMResult): Signature => {
  const header = (found.status.header ?? {}) as Properties
  const domain = clip(header.d || found.signingDomain)
  const [result, reason] = resultOf(found)
  return {
    kept: {
      d: domain,
      s: clip(found.selector),
      a: clip(found.algo),
      result,
      ...(header.b ? { b: clip(header.b, 8) } : {}),
      ...(reason === "" ? {} : { reason: clip(reason, maxReason) })
    },
    domain: canonical(domain),
    counts: result === "pass" && reason === "",
    isDoubtful: result === "temperror"
  }
}

/** A signature that was not looked at. */
const unseen = (tags: Guard.Claim["tags"], reason: string): Signature => {
  const tag = (name: string, length = maxText) => clip(tags.get(name), length)
  const kept = { d: tag("d"), s: tag("s"), a: tag("a"), b: tag("b", 8) }
  const domain = canonical(kept.d)
  return {
    kept: { ...kept, result: "permerror", reason },
    domain,
    counts: false,
    isDoubtful: false
  }
}

/** The signatures of a message in their order: what the library says of those it got to see. */
export const signatures = (
  claims: ReadonlyArray<Guard.Claim>,
  found: Signatures
): ReadonlyArray<Signature> => {
  // It has one answer for each, or a "none" if there is no signature.
  const answers = found.dkim.filter(({ status }) => status.result !== "none").values()
  return claims.map(({ refused, tags }) => {
    const answer = refused === undefined ? answers.next().value : undefined
    return answer === undefined ? unseen(tags, refused ?? "not readable") : signature(answer)
  })
}

/** The signatures of a message that could not be looked at. */
export const allUnseen = (
  claims: ReadonlyArray<Guard.Claim>,
  reason: string
): ReadonlyArray<Signature> => claims.map(({ tags }) => unseen(tags, reason))

export type Arc = Pick<Auth, "arc" | "arc_i" | "arc_sealers">

/** A chain that passed has its sealers, the oldest first. */
export const arc = ({ arc: found }: Signatures): Arc => {
  const word = found.status.result
  const result = word === "pass" || word === "none" ? word : "fail"
  return {
    arc: result,
    arc_i: result === "none" ? 0 : found.i || 0,
    arc_sealers: result === "pass" ? (found.chain ?? []).map(sealerOf) : []
  }
}

/** The library's reading of a tag list. */
interface Tags {
  readonly parsed?: { readonly d?: { readonly value?: unknown } }
}

const sealerOf = (set: ARCChainEntry): string => {
  const domain = (set["arc-seal"] as Tags | undefined)?.parsed?.d?.value
  return clip(typeof domain === "string" ? domain : "")
}

export const noArc: Arc = { arc: "none", arc_i: 0, arc_sealers: [] }

/** All that was found, before it is one. `author` undefined = there is no single author domain. */
export interface Parts {
  readonly spf: Spf
  readonly signatures: ReadonlyArray<Signature>
  readonly arc: Arc
  readonly author: string | undefined
  readonly dmarc: Dmarc | "permerror"
  /** DMARC fails, but would not if what had no answer had passed (RFC 9989 section 5.4). */
  readonly isDoubtful: boolean
}

/**
 * Whether a domain that passed speaks for the author. Equal names always do; the walk of DMARC
 * says which others. Two From fields, or none, have no author to speak for.
 */
const isAligned = ({ author, dmarc }: Parts, domain: string): boolean =>
  author !== undefined &&
  domain !== "" &&
  (domain === author || (dmarc !== "permerror" && (dmarc.dkimAligned?.has(domain) ?? false)))

const isSpfAligned = ({ author, dmarc, spf }: Parts): boolean => {
  if (spf.result !== "pass" || author === undefined) return false
  const found = dmarc === "permerror" ? false : dmarc.response
  const isRelated = found !== false && found.alignment?.spf?.result !== undefined
  return isRelated || canonical(spf.domain ?? "") === author
}

export const join = (parts: Parts): Auth => {
  const response = parts.dmarc === "permerror" ? false : parts.dmarc.response
  const dkim = parts.signatures.map(({ counts, domain, kept }) => ({
    ...kept,
    aligned: counts && isAligned(parts, domain)
  }))
  const status = response === false ? "permerror" : response.status.result
  return {
    spf: parts.spf.result,
    spf_domain: parts.spf.domain === null ? null : clip(parts.spf.domain),
    ...(parts.spf.identity === undefined ? {} : { spf_identity: parts.spf.identity }),
    dkim,
    dmarc: parts.isDoubtful ? "temperror" : status,
    dmarc_policy: response === false ? null : (response.policy ?? null),
    dmarc_domain: response === false ? null : (response.domain ?? null),
    ...parts.arc,
    from_domain: parts.author ?? null,
    aligned: isSpfAligned(parts) || dkim.some((one) => one.aligned)
  }
}
