// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * Commands and replies of SMTP as a server sees them (RFC 5321 section 4.1, RFC 1870, RFC 6152,
 * RFC 6531; enhanced codes RFC 2034, RFC 3463, RFC 5248). Pure.
 */
import * as Result from "effect/Result"
import * as Address from "./Address.ts"
import type { Status } from "./Status.ts"
import type { Fault } from "./SmtpData.ts"

/** One reply line. */
export interface Reply {
  readonly code: number
  readonly status: Status
  readonly text: string
}

export const reply = (code: number, status: Status, text: string): Reply => ({ code, status, text })

/** Whether the reply grants what the command asked for. */
export const isPositive = ({ code }: Reply): boolean => code < 400

/** Replies that are given in more than one place. */
export const temporary = reply(451, "4.3.0", "temporary trouble, try again later")
export const outOfRoom = reply(452, "4.3.1", "no room at the moment, try again later")
export const tooLarge = reply(552, "5.3.4", "message too large")
export const shuttingDown = reply(421, "4.3.2", "going down, try again later")
export const malformed = reply(550, "5.6.0", "malformed message")
export const unknownRecipient = reply(550, "5.1.1", "no such recipient")
export const bareNewline = reply(500, "5.5.2", "a command ends with CR LF")
export const tooEarly = reply(554, "5.5.0", "something was sent before the reply that asks for it")
export const tooManyRecipients = reply(452, "4.5.3", "too many recipients")
export const tooManyErrors = reply(421, "4.7.0", "too many errors")

/** What MAIL says (RFC 5321 section 4.1.1.2). */
export interface Mail {
  /** undefined = the null reverse-path. */
  readonly sender: Address.Address | undefined
  /** RFC 1870: what the client believes; 0 = it did not say. */
  readonly sizeBytes: number
  readonly body: "7BIT" | "8BITMIME" | undefined
  readonly smtputf8: boolean
}

const badSender = reply(501, "5.1.7", "malformed sender address")
const badRecipient = reply(501, "5.1.3", "malformed recipient address")
const badCommand = reply(501, "5.5.4", "syntax: MAIL FROM:<address> or RCPT TO:<address>")
const badParameter = reply(501, "5.5.4", "malformed parameter")
const unknownParameter = reply(555, "5.5.4", "parameter not recognized")
const notUtf8 = reply(501, "5.5.2", "command is not UTF-8")

const needsUtf8 = (code: number): Reply => reply(code, "5.6.7", "address needs SMTPUTF8")

const utf8 = new TextDecoder("utf-8", { fatal: true })

/** Reads a whole MAIL command. The reply says what is wrong with it. */
export const parseMail = (line: Uint8Array): Result.Result<Mail, Reply> =>
  Result.gen(function* () {
    const text = yield* decode(line)
    const path = yield* readPath(text, /^MAIL FROM: ?/i, badSender)
    if (path.address?.domain === "") return yield* Result.fail(badSender)
    const parameters = yield* readParameters(text.slice(path.end))
    let mail: Mail = { sender: path.address, sizeBytes: 0, body: undefined, smtputf8: false }
    for (const [keyword, value] of parameters) mail = yield* apply(mail, keyword, value)
    // RFC 6531 section 3.5.
    if (!path.isAscii && !mail.smtputf8) return yield* Result.fail(needsUtf8(550))
    return mail
  })

/** Reads a whole RCPT command; `smtputf8` as the MAIL before it said. No parameter is known. */
export const parseRcpt = (
  line: Uint8Array,
  smtputf8: boolean
): Result.Result<Address.Address, Reply> =>
  Result.gen(function* () {
    const text = yield* decode(line)
    const path = yield* readPath(text, /^RCPT TO: ?/i, badRecipient)
    if (path.address === undefined) return yield* Result.fail(badRecipient)
    const parameters = yield* readParameters(text.slice(path.end))
    if (parameters.size > 0) return yield* Result.fail(unknownParameter)
    if (!path.isAscii && !smtputf8) return yield* Result.fail(needsUtf8(553))
    return path.address
  })

/** RFC 6531 section 3.1: a command is UTF-8; what is not cannot be an address. */
const decode = (line: Uint8Array): Result.Result<string, Reply> =>
  Result.try({ try: () => utf8.decode(line).trimEnd(), catch: () => notUtf8 })

const readPath = (
  text: string,
  command: RegExp,
  syntax: Reply
): Result.Result<Address.Path, Reply> => {
  const start = command.exec(text)?.[0].length
  if (start === undefined) return Result.fail(badCommand)
  return Result.mapError(Address.readPath(text, start), () => syntax)
}

/** esmtp-keyword and esmtp-value (RFC 5321 section 4.1.2). */
const parameter = /^([A-Za-z0-9][A-Za-z0-9-]*)(?:=([!-<>-~]+))?$/

const readParameters = (
  text: string
): Result.Result<ReadonlyMap<string, string | undefined>, Reply> => {
  const found = new Map<string, string | undefined>()
  if (text === "") return Result.succeed(found)
  if (!text.startsWith(" ")) return Result.fail(badParameter)
  for (const part of text.split(" ").filter((word) => word !== "")) {
    const read = parameter.exec(part)
    const keyword = read?.[1]?.toUpperCase()
    if (keyword === undefined || found.has(keyword)) return Result.fail(badParameter)
    found.set(keyword, read![2])
  }
  return Result.succeed(found)
}

const apply = (
  mail: Mail,
  keyword: string,
  value: string | undefined
): Result.Result<Mail, Reply> => {
  switch (keyword) {
    case "SIZE": // RFC 1870 section 3: 1 to 20 digits
      return value !== undefined && /^\d{1,20}$/.test(value)
        ? Result.succeed({ ...mail, sizeBytes: Number(value) })
        : Result.fail(badParameter)
    case "BODY": {
      const body = value?.toUpperCase()
      if (body === "7BIT" || body === "8BITMIME") return Result.succeed({ ...mail, body })
      return Result.fail(body === "BINARYMIME" ? unknownParameter : badParameter)
    }
    case "SMTPUTF8":
      return value === undefined
        ? Result.succeed({ ...mail, smtputf8: true })
        : Result.fail(badParameter)
    default:
      return Result.fail(unknownParameter)
  }
}

/** The reply to a message that could not be read to its end as it should. */
export const faultReply = (fault: Fault): Reply => faultReplies[fault]

const faultReplies: { readonly [F in Fault]: Reply } = {
  size: tooLarge,
  memory: outOfRoom,
  "bare newline": reply(550, "5.5.2", "bare CR or LF in message"),
  nul: reply(550, "5.6.0", "NUL in message"),
  line: reply(550, "5.6.0", "line too long")
}

/** Protocol name of a session for the trace field (RFC 3848, RFC 6531 section 4.3). */
export const protocol = (session: {
  readonly isExtended: boolean
  readonly isSecure: boolean
  readonly smtputf8: boolean
}): string => {
  if (!session.isExtended) return "SMTP"
  return `${session.smtputf8 ? "UTF8SMTP" : "ESMTP"}${session.isSecure ? "S" : ""}`
}
