// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * One mail transaction of an SMTP session (RFC 5321 section 3.3): nothing, then a sender, then
 * recipients, then DATA. Each command either moves it one step or leaves it as it was; RSET, EHLO,
 * STARTTLS and the end of a message put `empty` in its place. Pure.
 */
import * as Result from "effect/Result"
import * as Address from "./Address.ts"
import * as Smtp from "./Smtp.ts"

export interface Transaction {
  readonly mail: Smtp.Mail | undefined
  /** Accepted recipients, none twice. */
  readonly recipients: ReadonlyArray<Address.Address>
}

export const empty: Transaction = { mail: undefined, recipients: [] }

/** What a transaction may ask for. */
export interface Limits {
  readonly messageBytes: number
  readonly recipients: number
  /** Octets that are free at the moment. */
  readonly freeBytes: number
}

const secondSender = Smtp.reply(503, "5.5.1", "sender was given already")
const noSender = Smtp.reply(503, "5.5.1", "sender first")
const noRecipients = Smtp.reply(554, "5.5.1", "no valid recipients")
const noParameter = Smtp.reply(501, "5.5.4", "DATA takes no parameter")

/** MAIL. */
export const begin = (
  transaction: Transaction,
  line: Uint8Array,
  limits: Limits
): Result.Result<Transaction, Smtp.Reply> => {
  if (transaction.mail !== undefined) return Result.fail(secondSender)
  return Result.flatMap(Smtp.parseMail(line), (mail) => {
    // RFC 1870 section 6.1: the size a client declares is refused before the message is sent.
    if (mail.sizeBytes > limits.messageBytes) return Result.fail(Smtp.tooLarge)
    if (mail.sizeBytes > limits.freeBytes) return Result.fail(Smtp.outOfRoom)
    return Result.succeed({ mail, recipients: [] })
  })
}

/** RCPT: the address somebody has to decide about. */
export const recipient = (
  transaction: Transaction,
  line: Uint8Array,
  limits: Limits
): Result.Result<Address.Address, Smtp.Reply> => {
  if (transaction.mail === undefined) return Result.fail(noSender)
  return Result.flatMap(Smtp.parseRcpt(line, transaction.mail.smtputf8), (address) =>
    // RFC 5321 section 4.5.3.1.10: the rest is sent in another transaction.
    transaction.recipients.length >= limits.recipients && !has(transaction, address)
      ? Result.fail(Smtp.tooManyRecipients)
      : Result.succeed(address)
  )
}

export const has = (transaction: Transaction, { domain, local }: Address.Address): boolean =>
  transaction.recipients.some((known) => known.local === local && known.domain === domain)

/** The transaction with a recipient that was accepted. */
export const accept = (transaction: Transaction, address: Address.Address): Transaction =>
  has(transaction, address)
    ? transaction
    : { ...transaction, recipients: [...transaction.recipients, address] }

/** Whom a message is from and for. */
export interface Envelope {
  readonly mail: Smtp.Mail
  /** At least one. */
  readonly recipients: ReadonlyArray<Address.Address>
}

/** DATA: the sender and recipients of the message that may come now. */
export const data = (
  transaction: Transaction,
  line: Uint8Array,
  limits: Limits
): Result.Result<Envelope, Smtp.Reply> => {
  const { mail, recipients } = transaction
  if (mail === undefined) return Result.fail(noSender)
  if (recipients.length === 0) return Result.fail(noRecipients)
  if (line.subarray("DATA".length).some((octet) => octet !== 32)) return Result.fail(noParameter)
  // Messages that are on their way in get what is left; a new one is asked to come later.
  if (limits.freeBytes <= 0) return Result.fail(Smtp.outOfRoom)
  return Result.succeed({ mail, recipients })
}
