// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The trace field we put on top of every message we accept (RFC 5321 section 4.4). Every value is
 * checked where the field is made, whoever checked it before. Pure.
 */

/** What the field tells. */
export interface Trace {
  /** The name the client gave with EHLO or HELO. */
  readonly helo: string
  readonly ip: string
  readonly tls: { readonly version: string; readonly cipher: string } | undefined
  /** Our own name. */
  readonly hostname: string
  /** `ESMTPS` and the like (RFC 3848, RFC 6531 section 4.3). */
  readonly protocol: string
  readonly token: string
  /** Given only when the message has exactly one recipient, so that none learns of another. */
  readonly recipient: string | undefined
  readonly atMillis: number
}

/** Longest name shown: that of a domain (RFC 5321 section 4.5.3.1.2). */
const maxName = 255

/** The whole field with its last CRLF. The client's name in the DNS is not looked up: `unknown`. */
export const format = (trace: Trace): string => {
  const tls =
    trace.tls === undefined
      ? ""
      : `\r\n\t(using ${name(trace.tls.version)} with cipher ${name(trace.tls.cipher)})`
  const recipient = trace.recipient === undefined ? "" : `\r\n\tfor <${oneLine(trace.recipient)}>`
  const by = `by ${name(trace.hostname)} with ${name(trace.protocol)} id ${name(trace.token)}`
  return (
    `Received: from ${name(trace.helo)} (unknown [${literal(trace.ip)}])${tls}\r\n` +
    `\t${by}${recipient};\r\n\t${date(trace.atMillis)}\r\n`
  )
}

/** A name as a reader of the field can trust it: nothing in it opens a comment or ends a part. */
const name = (text: string): string => {
  const shown = text.slice(0, maxName).replace(/[^A-Za-z0-9._:\-[\]]/g, "?")
  return shown === "" ? "unknown" : shown
}

const literal = (ip: string): string => name(ip.includes(":") ? `IPv6:${ip}` : ip)

const oneLine = (text: string): string => text.replace(/[\p{Cc}\p{Zl}\p{Zp}]/gu, "?")

/** RFC 5322 section 3.3, in UTC. */
const date = (millis: number): string => new Date(millis).toUTCString().replace("GMT", "+0000")
